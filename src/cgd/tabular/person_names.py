"""Recognise names of persons by their form, in any script, and by common names of many languages.

No list is complete, and other words have the form of names. So `cgd schema` asks, where only people can tell.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

from cgd.tabular.ordinary_words import folded, is_ordinary, word_set

MAX_WORDS = 5
MIN_UPPER = 3  # letters of a word in capitals or in lower case; shorter ones are codes
MAX_HAN = 6  # letters of a Chinese or Japanese name
MAX_CODE = 4  # letters of a word in capitals that is a code, if it has no vowel
_PARTICLES = word_set(
    "von vom van der den de del della di da do dos das du la le los las el al bin ibn bint abu ben ter ten zu zur zum "
    "y e af av mac mc st san jr sr"
)
_TITLES = r"(?:Dr|Prof|Mr|Mrs|Ms|Mme|Mlle|Herr|Frau|Hr\.|Fr\.|Dra|Sra|Señora?|Schwester|Pfleger)"
_TITLE = re.compile(rf"(?!(?-i:MS) ){_TITLES}\.? .+", re.IGNORECASE)  # MS is a disease
_TITLE_INSIDE = re.compile(rf"\b{_TITLES}\.? (?:med\. |Dr\. )*([^\W\d_]+)")
_INITIALS = re.compile(r"(?:[^\W\d_]\.-?)+|[^\W\d_]")
_COMMAS = re.compile("[,，،、]")
_ROMAN = re.compile(r"[IVX]+")
_CONTACT = re.compile(
    r"[^\s@]@[^\s@]+\.\w|(?<![\w.,])(?:\+\d|\(?0\d)(?:[ ()/.-]{0,2}\d){6,13}(?!\w)"
    r"|(?<![\w.-])\d{3}[-. ]\d{3,4}[-. ]\d{4}(?![\w-])"
    r"|\b(?:tel|phone|fon|telefon|mobile?|handy|cell)\b\D{0,3}\d{5,}",
    re.IGNORECASE,
)
_HAN, _HANGUL = re.compile(r"[\u4e00-\u9fff々]{2,4}"), re.compile(r"[\uac00-\ud7a3]{3}")
_CHINESE = (
    "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯董萧程曹袁邓许傅沈曾彭吕苏卢蒋蔡贾丁魏薛叶阎余潘杜戴钟汪田姜范石姚谭廖邹熊金陆郝孔崔"
    "毛邱秦顾侯邵孟龙段雷钱汤尹黎乔贺赖龚張劉陳楊趙黃吳孫馬羅鄭謝韓馮許鄧蕭盧蔣賈葉鍾譚陸"
)
_KOREAN = "김이박최정강조윤장임한오서신권황안송류홍"
_JAPANESE = tuple(
    word_set(
        "佐藤 鈴木 高橋 田中 伊藤 渡辺 山本 中村 小林 加藤 吉田 山田 佐々 山口 松本 井上 木村 斎藤 清水 山崎 池田 橋本 "
        "阿部 石川 前田 藤田 小川 岡田 後藤 長谷 村上 近藤 石井 坂本 遠藤 青木 藤井 西村 福田 太田 三浦 岡本 松田 中川"
    )
)
GIVEN_NAMES = word_set(
    "anna anne ana ann annika hannah hanna emma mia lena lea laura julia julie lisa sarah sara sofia sophie sophia "
    "marie maria mary martha marta eva elena helena helga ursula monika petra sabine susanne susan claudia andrea "
    "barbara birgit brigitte christine christina katharina katherine kate elisabeth elizabeth johanna jana jane janet "
    "jennifer jessica linda patricia margaret nancy betty dorothy sandra ashley emily amanda melissa deborah stephanie "
    "rebecca carol sharon kathleen amy alice angela isabel isabella carmen lucia ines ingrid astrid karin kerstin "
    "heike renate gisela erika greta clara klara charlotte camille chloe manon nathalie sylvie monique francoise "
    "jacqueline giulia chiara francesca alessandra beatriz juana rosa magdalena agnieszka malgorzata katarzyna zofia "
    "ewa olga natalia tatjana tatiana svetlana irina ekaterina fatima aisha aysha fatma ayse zeynep mariam maryam "
    "leila layla yasmin priya anita sunita mei yuki hiroko sakura ngoc thi jose juan luis carlos miguel pedro pablo "
    "javier manuel antonio francisco jorge diego alejandro fernando ricardo eduardo sergio rafael john james robert "
    "michael william david richard joseph thomas charles christopher daniel matthew anthony donald steven paul andrew "
    "joshua kenneth kevin brian george edward ronald timothy jason jeffrey ryan jacob gary nicholas eric jonathan "
    "stephen larry justin scott brandon benjamin samuel gregory frank alexander patrick jack dennis jerry peter hans "
    "klaus jürgen wolfgang günter gunther dieter manfred horst helmut karl heinz gerhard walter werner uwe stefan "
    "stephan andreas christian markus matthias tobias florian sebastian felix lukas jonas leon maximilian philipp "
    "moritz jan jens lars sven erik bjorn nils olaf pierre jean jacques michel philippe alain francois nicolas olivier "
    "laurent guillaume antoine giuseppe giovanni marco luca matteo lorenzo alessandro andrzej piotr krzysztof tomasz "
    "pawel jakub ivan dmitri dmitry sergei alexei vladimir igor mohammed mohamed muhammad ahmed ahmad ali omar umar "
    "hassan hussein ibrahim yusuf youssef khalid mustafa mehmet murat emre raj rahul amit sanjay vijay anil wei ming "
    "hiroshi takashi kenji minh sean liam noah oliver ethan محمد علي فاطمة أحمد احمد خالد مريم سارة يوسف ليلى عمر هدى "
    "حسن حسين إبراهيم عبد محمود анна мария елена ольга иван сергей александр дмитрий наталья татьяна"
)
SURNAMES = word_set(
    "smith johnson williams jones miller davis garcia rodriguez martinez hernandez lopez gonzalez wilson anderson "
    "taylor moore jackson thompson harris sanchez clark ramirez lewis robinson perez nguyen tran pham müller mueller "
    "schmidt schneider fischer weber meyer meier maier mayer wagner becker schulz hoffmann schäfer koch richter klein "
    "wolf schröder neumann zimmermann krüger hofmann hartmann lange krause lehmann schmid huber gruber "
    "steiner moser keller novak nowak kowalski wisniewski ivanov petrov horvath nagy kovacs toth popescu dubois durand "
    "leroy moreau lefebvre rossi russo ferrari esposito bianchi romano silva santos oliveira pereira fernandez gomez "
    "diaz ruiz jansen vries bakker visser hansen johansen olsen larsen nielsen jensen pedersen andersen andersson "
    "johansson karlsson nilsson eriksson virtanen korhonen yilmaz kaya demir öztürk singh kumar sharma patel khan "
    "hussain wang zhang chen liu yang huang zhao zhou kim tanaka suzuki sato watanabe okafor mensah brien murphy "
    "kelly"
)
COMMON_NAMES = GIVEN_NAMES | SURNAMES


def name_style(text: str) -> str:
    """Return how the words of a text are written, if it may be a name of a person; else an empty text.

    Examples:
        >>> name_style("Anna-Maria von Weber"), name_style("KELLER A."), name_style("müller"), name_style("王伟")
        ('title', 'upper', 'lower', 'no case')
        >>> [name_style(text) for text in ("Self-emp-not-inc", "Day clinic", "T2N0M0", "LBBB", "A", "II")]
        ['', '', '', '', '', '']
    """
    words = text.replace(",", " ").replace("·", " ").split()
    rest = [word for word in words if folded(word.strip(".")) not in _PARTICLES]
    names = [word for word in rest if not _INITIALS.fullmatch(word) or _has_no_case(word)]
    if len(words) > MAX_WORDS or not rest:
        return ""
    if not names:
        return "initials" if sum(map(str.isalpha, text)) > 1 and "." in text else ""
    if len(names) > 1 and all(map(_has_no_case, names)):  # 高橋 健
        names = ["".join(names)]
    styles = set(map(_style, names))
    if styles == {"title", "upper"}:  # KELLER Anna
        return "title"
    return styles.pop() if len(styles) == 1 else ""


def is_several_names(text: str) -> bool:
    """Return whether a text has the form of two capitalised names or more, besides words such as von and San.

    Examples:
        >>> is_several_names("Anna von Weber"), is_several_names("San Francisco"), is_several_names("heart rate")
        (True, False, False)
    """
    names = [word for word in text.split() if folded(word.strip(".")) not in _PARTICLES]
    return len(names) > 1 and name_style(text) in ("title", "upper")


def _style(word: str) -> str:
    """Return how one word of a name is written, or an empty text if it is no name."""
    parts = [part for part in re.split("['’-]", word) if part]
    if not parts or not all(unicodedata.category(each)[0] in "LM" for part in parts for each in part):
        return ""
    letters = "".join(parts)
    if _has_no_case(letters):
        han = any("\u4e00" <= each <= "\u9fff" for each in letters)
        return "no case" if len(letters) >= 2 and (not han or len(letters) <= MAX_HAN) else ""
    if letters.isupper():
        code = len(letters) <= MAX_CODE and not re.search("[aeiouyаеиоуяαειου]", folded(letters))
        return "" if len(letters) < MIN_UPPER or code or _ROMAN.fullmatch(letters) else "upper"
    if letters.islower():
        return "lower" if len(letters) >= MIN_UPPER else ""
    capital = all(part[0].isupper() or len(part) == 1 for part in parts)
    return "title" if capital and any(map(str.islower, letters)) else ""


def _has_no_case(text: str) -> bool:
    return text.lower() == text.upper() and any(map(str.isalpha, text))


def has_given_name(text: str) -> bool:
    """Return whether a word of a text is a common given name.

    Examples:
        >>> has_given_name("KELLER Anna-Maria"), has_given_name("Heart Rate")
        (True, False)
    """
    return not _words(text).isdisjoint(GIVEN_NAMES)


def has_common_name(text: str) -> bool:
    """Return whether a text has a common given name or surname, and no word of an ordinary category.

    Examples:
        >>> [has_common_name(text) for text in ("Ana García Gómez", "李娜", "محمد علي", "a.keller", "Weber 1956")]
        [True, True, True, True, True]
        >>> has_common_name("North Ward"), has_common_name("高血压")
        (False, False)
    """
    listed = not _words(text).isdisjoint(COMMON_NAMES) or _has_eastern_surname(text)
    return listed and not is_no_name(text)


def is_no_name(text: str) -> bool:
    """Return whether a text has a word of an ordinary category, and no given name.

    Examples:
        >>> is_no_name("Stage II"), is_no_name("de Vries, Jan")
        (True, False)
    """
    return is_ordinary(text) and not has_given_name(text)


def _words(text: str) -> set[str]:
    return set("".join(each if each.isalpha() else " " for each in folded(text)).split())


def _has_eastern_surname(text: str) -> bool:
    if _HAN.fullmatch(text):
        return (len(text) <= 3 and text[0] in _CHINESE) or text.startswith(_JAPANESE)
    return bool(_HANGUL.fullmatch(text)) and text[0] in _KOREAN


def is_full_name(text: str) -> bool:
    """Return whether a text has the form of a full name: with a title, or the surname before a comma.

    Examples:
        >>> [is_full_name(text) for text in ("Dr. Abel", "de Vries, Jan", "Keller,A.", "Łuczak, Anna M.", "王伟, 女")]
        [True, True, True, True, True]
        >>> is_full_name("Anna Keller"), is_full_name("employed, full time"), is_full_name("weight, kg")
        (False, False, False)
    """
    return _TITLE.fullmatch(text) is not None or has_surname_first(text)


def has_surname_first(text: str) -> bool:
    """Return whether a text has the form of a surname, a comma, and a given name or initials.

    Examples:
        >>> [has_surname_first(text) for text in ("Abel,Anna", "abel, anna", "Hepatitis, B", "Huber, B", "血压, 高压")]
        [True, True, False, True, False]
    """
    last, comma, first = (part.strip() for part in _COMMAS.sub(",", text).partition(","))
    style = name_style(last)
    if not comma or not first or not style or is_no_name(text):
        return False
    if style == "no case":
        described = first in ("男", "女") or first.isdigit() or (name_style(first) == style and not _HAN.match(first))
        return described and has_common_name(last)
    if style == "lower":
        return name_style(first) == "lower"
    initials = _INITIALS.fullmatch(first.replace(" ", "")) is not None and ("." in first or has_common_name(last))
    return initials or name_style(first) in ("title", "upper")


def mentions_a_person(text: str) -> bool:
    """Return whether a text contains a phone number, an e-mail address, a title with a name, or a full name.

    Examples:
        >>> mentions_a_person("with her daughter, tel. 0171 2345678"), mentions_a_person("seen by Dr. Abel")
        (True, True)
        >>> mentions_a_person("lives with Anna Abel"), mentions_a_person("0.05-0.10 mg"), mentions_a_person("Grade 3")
        (True, False, False)
    """
    words = [word.strip(".,;:()") for word in text.split()]
    full = any(
        is_several_names(f"{one} {other}") and has_given_name(f"{one} {other}") and not is_ordinary(f"{one} {other}")
        for one, other in pairwise(words)
    )
    return full or has_title(text) or _CONTACT.search(text) is not None


def has_title(text: str) -> bool:
    """Return whether a text contains a title with a capitalised word behind it.

    Examples:
        >>> has_title("Dr. med. Abel"), has_title("seen by Frau Keller"), has_title("MS duration")
        (True, True, False)
    """
    return any(found[1][0].isupper() for found in _TITLE_INSIDE.finditer(text))
