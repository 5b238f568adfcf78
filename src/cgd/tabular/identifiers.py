"""Recognise columns that identify persons, or records: identifiers, dates, names.

`cgd schema` leaves them out. A pattern cannot know what a column means, so everything that looks like an identifier is
recognised, and a note states how to keep the column. No note contains a value.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from typing import TYPE_CHECKING

from cgd.federation.data_schema import RARE
from cgd.tabular.ordinary_words import NO_ANSWER, folded, word_set
from cgd.tabular.person_names import has_common_name, is_full_name, is_no_name, mentions_a_person, name_style
from cgd.tabular.written_dates import has_date, has_day

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MOST = 0.8  # of the distinct values: some may be mistyped, or remarks
MIN_DISTINCT = 20  # fewer whole numbers may be distinct, and near each other, by chance
MAX_RECORDS_OF_A_PERSON, MIN_LETTERS = 50, 4  # on average; of a name in small or capital letters
MANY_DISTINCT = 50  # with a few of them repeated, these are hardly distinct by chance either
MIN_DIGITS = 5  # shorter whole numbers are counts, codes and years


# Words that make a column a date of birth or a person's name, wherever they are in its name.
PERSONAL_WORDS = word_set(
    "dob birthdate birthday surname forename firstname lastname fullname vorname nachname familienname geburtsdatum "
    "geburtstag geboren naissance nascimento nacimiento nascita geboortedatum cognome achternaam voornaam imię "
    "nazwisko soyad soyadı apellido apellidos фамилия имя отчество фио рождения"
)
# Words that make it an identifier there, such as patient_id.
IDENTIFIER_WORDS = word_set(
    "id ids identifier guid uuid mrn ssn nino iban passport username pesel bsn aadhaar ahv ahvn nir cpf dni "
    "versichertennummer versicherten fallnummer patientennummer kennung aktenzeichen personnummer снилс паспорт"
)
# Words of scripts that put no space between words.
IDENTIFYING_PARTS = tuple(
    word_set(
        "姓名 名字 身份证 电话 手机 地址 住址 出生日期 生日 病历号 住院号 门诊号 病案号 患者编号 氏名 名前 住所 "
        "生年月日 電話 患者番号 이름 성명 주민등록 전화 주소 생년월일 환자번호"
    )
)
# Words that make it one at the end of its name, such as home_phone.
CONTACT_WORDS = word_set("email mail phone telephone tel telefon mobile fax url website ip login телефон")
# Words that make it one at the end of its name, such as family_name and zip, unless every value is frequent.
QUASI_WORDS = word_set(
    "name names initials zip zipcode postcode postalcode plz address street city town patient person subject client "
    "customer member employee account patientin adresse anschrift strasse wohnort ort ville domicile doctor physician "
    "arzt hausarzt medecin nom prenom nombre nome naam namn адрес behandler therapeut"
)
# What is numbered, if the name of a column ends with a word for "number".
NUMBERED = word_set(
    "patient person subject client customer member employee case account insurance policy record file card phone "
    "social security medical hospital study sample specimen visit encounter admission zip postal pat fall kunden akte "
    "versicherung personal probanden"
)
NUMBER_WORDS = word_set("number no nr num code key nummer numero numéro número")
_COMPOUND = re.compile(
    r"(?:pat|patient|patienten|fall|kunden|klienten|personal|personen|mitglieds|akten|proben|probanden|versicherten|"
    r"versicherungs|aufnahme|case|person|subject|client)(?:nr|nummer|num|id|kennung|code|number)"
    r"|(?:patienten|familien|nach|vor|eltern|arzt|kunden|geburts|patient|full|last|first|sur|middle|maiden)namen?"
)
DATE_WORDS = word_set("date datetime timestamp datum fecha дата")
_PERSONAL_LOOKS = ("dates", "names of persons", "e-mail addresses", "phone numbers", "account numbers")

MIN_SURNAMES = 6
MIN_COMMON, COMMON_SHARE = 2, 1 / 3  # of the values: common names
MAX_RATIO = 3  # of the most frequent name to a usual one
_NUMBERED_CODE = re.compile(r"([^\W\d_]{1,5}[-_/. ]?)\d{3,}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+")
_COMPACT_DATE = re.compile(r"(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\.0)?")
_SHORT_DATE = re.compile(r"(?:0[1-9]|[12]\d|3[01])(?:0[1-9]|1[0-2])\d{2}|\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
EXCEL_DAYS, VISIT_DAYS = (30_000, 60_000), 3_660  # from 1982 on; ten years, because salaries vary more
DAYS_OF_BIRTH, MIN_DAY = (3_000, 50_000), 10_000  # from 1908 to 2036; most are of five digits, from 1927 on
UNIX_SECONDS = (9.4e8, 2e9)
PHONE_DIGITS = (11, 12)  # with the code of the country
PATTERNS = {
    "e-mail addresses": re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+"),
    "UUIDs": re.compile(r"\{?[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\}?", re.IGNORECASE),
    "digests": re.compile(r"(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})", re.IGNORECASE),
    "addresses of computers": re.compile(r"(?:\d{1,3}\.){3}\d{1,3}|(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}", re.IGNORECASE),
    "web addresses": re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE),
    "account numbers": re.compile(r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?"),
    "phone numbers": re.compile(r"(?=(?:\D*\d){7,15}\D*$)(?:\+|00?|\()[\d ()/.-]+|\d{3}[-. ]\d{3,4}[-. ]\d{3,4}"),
    "numbers of persons": re.compile(
        r"\d{3}-\d{2}-\d{4}|\d{6}[-+]\d{3,4}[A-Z\d]?|[A-Z]{1,4}[-/ ]?\d{5,}|756\.?\d{4}\.?\d{4}\.?\d{2}"
        r"|[12] ?\d{2} ?(?:0[1-9]|1[0-2]) ?\w{2} ?\d{3} ?\d{3}(?: ?\d{2})?",
        re.IGNORECASE,
    ),
}
LOOKS: dict[str, Callable[[str], object]] = {
    "dates": has_date,
    **{what: pattern.fullmatch for what, pattern in PATTERNS.items()},
    "names of persons": is_full_name,
}


def words(name: str) -> list[str]:
    """Return the words of a column's name, in lower case and without accents.

    Examples:
        >>> words("patientID"), words("Date of birth"), words("ZIP-code2")
        (['patient', 'id'], ['date', 'of', 'birth'], ['zip', 'code', '2'])
    """
    return [folded(word) for word in _WORD.findall(name)]


def identifying_name(name: str, *, frequent: bool) -> str:
    """Return why the name of a column suggests an identifier or a date, or an empty text.

    Args:
        name: the name.
        frequent: whether every value has enough records, so that a name or a town identifies nobody.

    Examples:
        >>> identifying_name("patient_id", frequent=True)
        'its name suggests an identifier'
        >>> identifying_name("ward_name", frequent=True), identifying_name("patient age", frequent=False)
        ('', '')
    """
    found = [word for word in words(name) if not word.isdigit()]
    if not found:
        return ""
    if DATE_WORDS.intersection(found):
        return "its name suggests a date"
    numbered = found[-1] in NUMBER_WORDS and bool(NUMBERED.intersection(found))
    certain = (
        not (IDENTIFIER_WORDS | PERSONAL_WORDS).isdisjoint(found)
        or found[-1] in CONTACT_WORDS
        or numbered
        or any(map(_COMPOUND.fullmatch, found))
        or any(part in folded(name) for part in IDENTIFYING_PARTS)
    )
    return "its name suggests an identifier" if certain or (found[-1] in QUASI_WORDS and not frequent) else ""


def tells_about_a_person(name: str, look: str) -> bool:
    """Return whether values tell more about a person than a number does: names, addresses, dates.

    Args:
        name: the name of the column.
        look: what its values look like, by `identifying_texts`.

    Examples:
        >>> tells_about_a_person("patient_name", ""), tells_about_a_person("id", "dates")
        (True, True)
        >>> tells_about_a_person("case_id", "")
        False
    """
    found = words(name)
    anywhere = not (PERSONAL_WORDS | DATE_WORDS).isdisjoint(found) or any(
        part in folded(name) for part in IDENTIFYING_PARTS
    )
    return anywhere or not (CONTACT_WORDS | QUASI_WORDS).isdisjoint(found[-1:]) or look in _PERSONAL_LOOKS


def identifying_texts(texts: Iterable[str]) -> str:
    """Return what most of the distinct texts of a column look like, if that identifies a person, or an empty text.

    Examples:
        >>> identifying_texts(["1980-02-29", "01.12.1971", "3/4/1999 10:30"])
        'dates'
        >>> identifying_texts(["a@example.org", "b@example.org"]), identifying_texts(["A", "B"])
        ('e-mail addresses', '')
    """
    distinct = list(texts)
    for what, looks_so in LOOKS.items():
        if distinct and sum(bool(looks_so(text)) for text in distinct) >= MOST * len(distinct):
            return what
    return ""


def identifying_numbers(numbers: Mapping[float, int], *, distinct: bool) -> str:
    """Return what numbers look like, if that identifies a record, or an empty text.

    Args:
        numbers: the distinct numbers, with how often they occur.
        distinct: whether none occurs twice.

    Examples:
        >>> identifying_numbers({19800229.0: 1, 19711201.0: 2, 20010101.0: 1}, distinct=False)
        'dates'
        >>> identifying_numbers({float(number): 1 for number in range(100, 150, 2)}, distinct=True)
        'numbers of records'
        >>> identifying_numbers({float(number): 1 for number in range(10_000, 90_000, 1_000)}, distinct=True)
        'numbers of records'
        >>> identifying_numbers({float(number): 1 for number in range(100, 90_000, 1_000)}, distinct=True)
        ''
        >>> identifying_numbers({float(number): 1 + (number < 2) for number in range(100)}, distinct=False)
        'numbers of records'
    """
    low, high = min(numbers), max(numbers)
    if len(numbers) >= MIN_DISTINCT and low >= EXCEL_DAYS[0] and high <= EXCEL_DAYS[1] and high - low <= VISIT_DAYS:
        return "dates"
    if any(number != math.floor(number) for number in numbers):
        return ""
    texts = [f"{number:.0f}" for number in numbers]
    if len(texts) > 2 and all(map(_COMPACT_DATE.fullmatch, texts)):
        return "dates"
    if len(texts) > 2 and all(len(text) in PHONE_DIGITS for text in texts):
        return "phone numbers"
    if len(numbers) < MIN_DISTINCT:
        return ""
    if (low >= UNIX_SECONDS[0] and high <= UNIX_SECONDS[1]) or all(
        _SHORT_DATE.fullmatch(f"{each:0>6}") for each in texts
    ):
        return "dates"
    dense = len(numbers) >= (high - low + 1) / 2
    equal = len(set(map(len, texts))) == 1 and len(texts[0]) >= MIN_DIGITS and low > 0
    mostly_distinct = sum(numbers.values()) < 2 * len(numbers)
    # Rows may be in a table twice.
    distinct = distinct or (len(numbers) >= MANY_DISTINCT and sum(numbers.values()) <= 1.05 * len(numbers))
    if (distinct and (dense or equal)) or (equal and len(texts[0]) > MIN_DIGITS + 1 and mostly_distinct):
        return "numbers of records"
    return ""


def may_be_days(numbers: Mapping[float, int]) -> bool:
    """Return whether whole numbers may be dates of birth, as Excel counts days. Other numbers may be like that, too.

    Examples:
        >>> may_be_days({11_000.0 + 173 * number: 1 for number in range(100)})
        True
        >>> may_be_days({4_000.0 + 37 * number: 1 for number in range(200)})
        False
        >>> may_be_days({12_000.0 + 100 * number: 1 for number in range(200)})
        False
    """
    if len(numbers) < MIN_DISTINCT or min(numbers) < DAYS_OF_BIRTH[0] or max(numbers) > DAYS_OF_BIRTH[1]:
        return False
    whole = all(number == math.floor(number) for number in numbers)
    late, round_ones = sum(number >= MIN_DAY for number in numbers), sum(number % 10 == 0 for number in numbers)
    return whole and late >= MOST * len(numbers) and 2 * round_ones < len(numbers)


def are_persons(texts: Mapping[str, int]) -> bool:
    """Return whether texts may name persons with several records each, given how often each occurs.

    Codes of few letters, such as those of diseases, are no names, unless they are numbered like patients: P0012.

    Examples:
        >>> are_persons({f"person {number}": 8 for number in range(30)})
        True
        >>> are_persons({"surgery": 90, **{f"ward {number}": 8 for number in range(30)}})
        False
    """
    answers = {text: count for text, count in texts.items() if folded(text) not in NO_ANSWER}
    records = sum(answers.values())
    several = len(answers) >= MIN_DISTINCT and records < MAX_RECORDS_OF_A_PERSON * len(answers)
    names = sum(
        sum(map(str.isalpha, text)) >= MIN_LETTERS or name_style(text) in ("title", "no case") for text in answers
    )
    return several and max(answers.values()) < records / 10 and (2 * names > len(answers) or _are_numbered(answers))


def _are_numbered(texts: Mapping[str, int]) -> bool:
    """Return whether most texts are the same letters with a number of as many digits."""
    codes = Counter((found[1], len(text)) for text in texts if (found := _NUMBERED_CODE.fullmatch(text)))
    return max(codes.values(), default=0) >= MOST * len(texts)


def may_name_persons(texts: Mapping[str, int]) -> bool:
    """Return whether texts that are frequent may name persons, given how often each occurs; only people can tell.

    These contain a phone number or a date; or have common names; or have the form of names, are about equally frequent,
    and are no words of ordinary categories. Other words may be like that, too.

    Examples:
        >>> may_name_persons(dict.fromkeys("Abel Dahl Fuchs Huber Klein Lopez Meyer Novak".split(), 18))
        True
        >>> may_name_persons(dict.fromkeys("January March April May June July August October".split(), 18))
        False
        >>> may_name_persons({"Anna": 50, "Jonas": 7, "none": 100})
        True
        >>> may_name_persons({"alone": 90, "tel. 0171 234567": 8})
        True
    """
    frequent = {text: count for text, count in texts.items() if count >= RARE and folded(text) not in NO_ANSWER}
    if any(mentions_a_person(text) or has_day(text) for text in frequent):
        return True
    common = sum(map(has_common_name, frequent))
    if common >= MIN_COMMON and common >= COMMON_SHARE * len(frequent):
        return True
    if len(frequent) < MIN_SURNAMES or max(frequent.values()) > MAX_RATIO * statistics.median(frequent.values()):
        return False
    names = sum(bool(name_style(text)) for text in frequent)
    return names >= MOST * len(frequent) and 2 * sum(map(is_no_name, frequent)) < len(frequent)


def rare_share(counts: Iterable[int]) -> float:
    """Return the part of the records whose value has fewer than `RARE` records.

    Examples:
        >>> rare_share([50, 45, 5]), rare_share([1] * 90 + [10])
        (0.0, 0.9)
    """
    numbers = list(counts)
    return sum(number for number in numbers if number < RARE) / max(1, sum(numbers))
