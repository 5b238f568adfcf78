"""Recognise columns that identify persons, or records: identifiers, dates, names.

`cgd schema` leaves them out. A pattern cannot know what a column means, so everything that looks like an identifier is
recognised, and a note states how to keep the column. No note contains a value.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from cgd.federation.data_schema import RARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST = 0.8  # of the distinct values: some may be mistyped, or remarks
MIN_DISTINCT = 20  # fewer whole numbers may be distinct, and near each other, by chance
MAX_RECORDS_OF_A_PERSON, MIN_LETTERS = 50, 4  # on average; of a name
MANY_DISTINCT = 50  # with a few of them repeated, these are hardly distinct by chance either
MIN_DIGITS = 5  # shorter whole numbers are counts, codes and years


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Words that make a column an identifier, wherever they are in its name, such as patient_id.
IDENTIFIER_WORDS = word_set(
    "id ids identifier guid uuid mrn ssn nino dob birthdate birthday iban passport surname forename firstname lastname "
    "fullname username vorname nachname geburtsdatum pesel bsn aadhaar ahv ahvn nir naissance nascimento nacimiento "
    "geburtstag geboren versichertennummer versicherten fallnummer patientennummer"
)
# Words that make it one at the end of its name, such as home_phone.
CONTACT_WORDS = word_set("email mail phone telephone tel telefon mobile fax url website ip login")
# Words that make it one at the end of its name, such as family_name and zip, unless every value is frequent.
QUASI_WORDS = word_set(
    "name names initials zip zipcode postcode postalcode plz address street city town patient person subject client "
    "customer member employee account patientin adresse anschrift strasse wohnort ort ville domicile doctor physician "
    "arzt hausarzt medecin nom prenom apellido nombre"
)
# What is numbered, if the name of a column ends with a word for "number".
NUMBERED = word_set(
    "patient person subject client customer member employee case account insurance policy record file card phone "
    "social security medical hospital study sample specimen visit encounter admission zip postal"
)
NUMBER_WORDS = word_set("number no nr num code key")
DATE_WORDS = word_set("date datetime timestamp datum fecha")
_PERSONAL_WORDS = CONTACT_WORDS | QUASI_WORDS | DATE_WORDS | word_set("surname forename firstname lastname fullname")
_PERSONAL_LOOKS = ("dates", "names of persons", "e-mail addresses", "phone numbers", "account numbers")

MIN_SURNAMES = 6
_SURNAME = re.compile(
    r"[^\W\d_]{3,}(?:['’ -][^\W\d_]{3,})?(?:,? [^\W\d_]\.?)?|[^\W\d_]['’][^\W\d_]+|(?:[^\W\d_]\. ?){2,3}"
)
KNOWN_WORDS = word_set(
    "yes no none other unknown monday tuesday wednesday thursday friday saturday sunday montag dienstag mittwoch "
    "donnerstag freitag samstag sonntag lundi mardi mercredi jeudi vendredi samedi dimanche january february march "
    "april may june july august september october november december januar februar märz mai juni juli oktober dezember "
    "mon tue wed thu fri sat sun jan feb mar apr jun jul aug sep oct nov dec red green blue yellow black white brown "
    "grey gray orange purple pink austria belgium denmark finland france germany italy netherlands norway poland "
    "portugal spain sweden switzerland japan china india brazil canada mexico surgery cardiology oncology neurology "
    "urology radiology paediatrics pediatrics orthopaedics orthopedics psychiatry dermatology gynaecology gynecology"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+")
_TIME = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?(?:Z|\s?[+-]\d{2}:?\d{2})?)?"
_MONTH = r"(?:jan|feb|fév|mar|apr|avr|may|jun|juin|jul|juil|aug|aoû|sep|oct|nov|dec|déc|mär|mai|okt|dez)[a-zéû]*"
_DATE = re.compile(
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.](?:\d{{4}}|\d{{2}})"
    rf"|\d{{1,2}}[. -]+{_MONTH}[., -]+\d{{2,4}}|{_MONTH}[. -]+\d{{1,2}},?[ -]+\d{{4}}){_TIME}",
    re.IGNORECASE,
)
_COMPACT_DATE = re.compile(r"(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\.0)?")
_SHORT_DATE = re.compile(r"(?:0[1-9]|[12]\d|3[01])(?:0[1-9]|1[0-2])\d{2}|\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
EXCEL_DAYS, VISIT_DAYS = (30_000, 60_000), 3_660  # from 1982 on; ten years, because salaries vary more
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
    "names of persons": re.compile(
        r"(?:Dr|Prof|Mr|Mrs|Ms|Herr|Frau)\.? .+|[^\W\d_][^\W\d_' -]+, [^\W\d_][^\W\d_' .-]*", re.IGNORECASE
    ),
    "months of birth or of a visit": re.compile(r"(?:19|20)\d{2}[-/.](?:0[1-9]|1[0-2])"),
    "numbers of persons": re.compile(
        r"\d{3}-\d{2}-\d{4}|\d{6}[-+]\d{3,4}[A-Z\d]?|[A-Z]{1,4}[-/ ]?\d{5,}|756\.?\d{4}\.?\d{4}\.?\d{2}"
        r"|[12] ?\d{2} ?(?:0[1-9]|1[0-2]) ?\w{2} ?\d{3} ?\d{3}(?: ?\d{2})?",
        re.IGNORECASE,
    ),
}


def words(name: str) -> list[str]:
    """Return the words of a column's name, in lower case.

    Examples:
        >>> words("patientID"), words("Date of birth"), words("ZIP-code2")
        (['patient', 'id'], ['date', 'of', 'birth'], ['zip', 'code', '2'])
    """
    return [word.lower() for word in _WORD.findall(name)]


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
    certain = bool(IDENTIFIER_WORDS.intersection(found)) or found[-1] in CONTACT_WORDS or numbered
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
    last = words(name)[-1:]
    return bool(_PERSONAL_WORDS.intersection(last)) or look in _PERSONAL_LOOKS


def identifying_texts(texts: Iterable[str]) -> str:
    """Return what most of the distinct texts of a column look like, if that identifies a person, or an empty text.

    Examples:
        >>> identifying_texts(["1980-02-29", "01.12.1971", "3/4/1999 10:30"])
        'dates'
        >>> identifying_texts(["a@example.org", "b@example.org"]), identifying_texts(["A", "B"])
        ('e-mail addresses', '')
    """
    distinct = list(texts)
    for what, pattern in {"dates": _DATE, **PATTERNS}.items():
        if distinct and sum(pattern.fullmatch(text) is not None for text in distinct) >= MOST * len(distinct):
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


def are_persons(texts: Mapping[str, int]) -> bool:
    """Return whether texts may name persons with several records each, given how often each occurs.

    Codes of few letters, such as those of diseases, are no names.

    Examples:
        >>> are_persons({f"person {number}": 8 for number in range(30)})
        True
        >>> are_persons({"surgery": 90, **{f"ward {number}": 8 for number in range(30)}})
        False
    """
    records = sum(texts.values())
    several = len(texts) >= MIN_DISTINCT and records < MAX_RECORDS_OF_A_PERSON * len(texts)
    names = sum(sum(map(str.isalpha, text)) >= MIN_LETTERS for text in texts)
    return several and max(texts.values()) < records / 10 and 2 * names > len(texts)


def may_be_surnames(texts: Mapping[str, int]) -> bool:
    """Return whether a few texts may be surnames or initials of persons with many records each.

    These are single capitalised words, about equally frequent, and not known words. Other words may be like that, too.

    Examples:
        >>> may_be_surnames(dict.fromkeys("Abel Dahl Fuchs Huber Klein Lopez Meyer Novak".split(), 18))
        True
        >>> may_be_surnames(dict.fromkeys("January March April May June July August October".split(), 18))
        False
    """
    if not MIN_SURNAMES <= len(texts) < MIN_DISTINCT or max(texts.values()) > 3 * min(texts.values()):
        return False
    names = sum(_SURNAME.fullmatch(text) is not None and text[0].isupper() for text in texts)
    known = sum(text.lower() in KNOWN_WORDS for text in texts)
    return names >= MOST * len(texts) and 2 * known < len(texts)


def rare_share(counts: Iterable[int]) -> float:
    """Return the part of the records whose value has fewer than `RARE` records.

    Examples:
        >>> rare_share([50, 45, 5]), rare_share([1] * 90 + [10])
        (0.0, 0.9)
    """
    numbers = list(counts)
    return sum(number for number in numbers if number < RARE) / max(1, sum(numbers))
