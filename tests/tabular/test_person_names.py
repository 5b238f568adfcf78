"""Names of persons in a table: in any script and order, and not confused with ordinary categories."""

from __future__ import annotations

import csv
import gzip
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sklearn.datasets import load_breast_cancer

from cgd.federation.privacy_section import PERSONS_QUESTION
from cgd.tabular.identifiers import identifying_name
from cgd.tabular.schema import suggest_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

CHINESE = (
    "王伟|李娜|张敏|刘洋|陈静|杨军|赵磊|黄丽|周强|吴霞|徐勇|孙艳|马超|朱杰|胡涛|郭明|何平|林峰|高燕|罗刚|郑斌|梁红|谢辉"
)
SHORT = "Ng|Li|Wu|Xu|Ho|Ma|Yu|Hu|He|Lu|Du|Su|Ye|Fu|Bo|Jo|Ko|Oh|An|Yi|Ha|Ku|Mo|Ro|Lee|Kim|Roy|Cox"
CODES = "|".join(f"P{number:04}" for number in range(30))
FEW = {
    "arabic": "محمد علي|فاطمة حسن|أحمد سعيد|خالد عمر|مريم يوسف|سارة محمود",
    "chinese": "王伟|李娜|张敏|刘洋|陈静|杨军|赵磊|黄丽",
    "japanese": "佐藤 太郎|鈴木 花子|高橋 健|田中 美咲|伊藤 翔|渡辺 結衣",
    "korean": "김민수|이영희|박지훈|최수진|정우성|강하늘",
    "hebrew": "כהן|לוי|מזרחי|פרץ|ביטון|דהן",
    "hindi": "राम कुमार|सीता देवी|मोहन लाल|गीता शर्मा|अनिल वर्मा|सुनीता सिंह",
    "greek": "Παπαδόπουλος|Γεωργίου|Δημητρίου|Νικολάου|Ιωάννου|Κωνσταντίνου",
    "russian": "Иванов И.И.|Петрова А.С.|Сидоров О.П.|Кузнецов П.А.|Смирнова О.В.|Попов Л.Н.",
    "spanish": "Ana García Gómez|José García Ruiz|Luis García Sanz|Elena García Vega|Juan García Gil|Pablo García Mora",
    "von": "Anna-Maria von Abel|Anna-Maria von Dahl|Eva von Fuchs|Ida von Huber|Eva von Klein|Ida von Okoro",
    "dutch": "van der Berg|de Vries|ten Brink|van Dijk|de Jong|van Leeuwen",
    "irish": "O'Brien|O’Neill|McDonald|MacLeod|Fitzgerald|D'Angelo",
    "lower case": "müller|schmidt|schneider|fischer|weber|meyer",
    "lower case, not common": "abel|dahl|fuchs|okoro|brandt|eriksen",
    "capitals": "ABEL|DAHL|FUCHS|OKORO|BRANDT|ERIKSEN",
    "initials": "A.K.|B.M.|C.W.|D.F.|E.H.|F.L.",
    "logins": "a.keller|j.weber|e.meyer|t.fischer|i.huber|m.koch",
    "years": "Keller 1956|Weber 1960|Meyer 1971|Fischer 1944|Huber 1980|Koch 1939",
    "two": "Anna Keller|Jonas Weber",
}
ORDINARY = {
    "blood": "A+|A-|B+|B-|AB+|AB-|0+|0-",
    "blood, in words": "A pos|A neg|B pos|B neg|AB pos|AB neg|O pos|O neg",
    "chapters": "A00-B99|C00-D48|D50-D90|E00-E90|F00-F99|G00-G99|H00-H59|I00-I99",
    "diagnoses": "I10|I21|I48|J18|E11|N18|C50|K35",
    "wards": "A|B|C|D|E|F",
    "wards, in words": "Ward A|Ward B|Ward C|Ward D|Ward E|Ward F",
    "answers": "yes|no|unknown",
    "work": "Private|Self-emp-not-inc|Self-emp-inc|Federal-gov|Local-gov|State-gov|Without-pay|Never-worked",
    "marriage": "single|married|divorced|widowed|separated|partnered",
    "marriage, de": "Ledig|Verheiratet|Geschieden|Verwitwet|Getrennt lebend|Verpartnert",
    "marriage, fr": "Célibataire|Marié|Divorcé|Veuf|Séparé|Pacsé",
    "marriage, es": "Soltero|Casado|Divorciado|Viudo|Separado|Unión libre",
    "marriage, zh": "未婚|已婚|离异|丧偶|再婚|同居",
    "education": "Preschool|Primary|Secondary|Bachelors|Masters|Doctorate|Some-college",
    "education, de": "Hauptschule|Realschule|Abitur|Lehre|Hochschule|Promotion",
    "education, fr": "Primaire|Collège|Lycée|Baccalauréat|Licence|Master|Doctorat",
    "education, es": "Primaria|Secundaria|Bachillerato|Universidad|Maestría|Doctorado",
    "education, zh": "小学|初中|高中|大专|本科|硕士|博士",
    "countries": "Austria|Germany|Switzerland|France|Italy|Spain|Poland|Norway",
    "countries, de": "Österreich|Deutschland|Schweiz|Frankreich|Italien|Spanien|Polen",
    "departments": "Cardiology|Neurology|Oncology|Urology|Surgery|Radiology|Dermatology",
    "departments, de": "Kardiologie|Neurologie|Onkologie|Urologie|Chirurgie|Innere Medizin",
    "departments, fr": "Cardiologie|Neurologie|Oncologie|Urologie|Chirurgie|Pédiatrie",
    "departments, es": "Cardiología|Neurología|Oncología|Urología|Cirugía|Pediatría",
    "departments, zh": "内科|外科|儿科|妇科|骨科|眼科|皮肤科",
    "diseases, zh": "高血压|糖尿病|冠心病|哮喘|肺炎|中风",
    "jobs": "admin.|blue-collar|entrepreneur|housemaid|management|retired|self-employed|services|student|technician",
    "jobs, de": "Angestellt|Arbeitslos|Selbständig|Rentner|Student|Beamter",
    "jobs, fr": "Employé|Ouvrier|Retraité|Étudiant|Chômeur|Cadre",
    "jobs, es": "Empleado|Desempleado|Jubilado|Estudiante|Obrero|Autónomo",
    "jobs, zh": "农民|工人|学生|教师|退休|干部",
    "ecg": "AFIB|SR|LBBB|RBBB|PVC|PAC|STD|STE|AVB",
    "stages": "Stage I|Stage II|Stage III|Stage IV|Stage IIa|Stage IIb",
    "tnm": "T1N0M0|T2N0M0|T2N1M0|T3N1M0|T4N2M1|T1N1M0",
    "drugs": "aspirin|metformin|ramipril|simvastatin|ibuprofen|paracetamol|omeprazole",
    "tumours": "adenosis|fibroadenoma|phyllodes tumor|ductal carcinoma|lobular carcinoma|mucinous carcinoma",
    "months": "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec",
    "answers of a survey": "not at all|several days|more than half the days|nearly every day|never|always",
    "admissions": "EMERGENCY|ELECTIVE|URGENT|OBSERVATION|NEWBORN|SURGICAL",
    "ages": "0-9|10-19|20-29|30-39|40-49|50-59",
    "doses": "0.05-0.10 mg|0.10-0.20 mg|0.20-0.50 mg|0.50-1.00 mg|1.00-2.00 mg|2.00-5.00 mg",
}


def suggestion(path: Path, name: str, values: Sequence[str], *, private: bool = False, label: str = "outcome") -> str:
    """Return the suggestion for a table of one column of texts, and a few others."""
    with (path / "table.csv").open("w", newline="", encoding="utf-8") as file:
        rows = [[value, place % 17 + 0.5, ("no", "yes")[place % 2]] for place, value in enumerate(values)]
        csv.writer(file).writerows([[name, "v", "outcome"], *rows])
    return suggest_schema(path / "table.csv", label, private=private)


def line(text: str, name: str) -> str:
    return next(each for each in text.splitlines() if each.startswith((name, f"# {name}", f'"{name}"', f'# "{name}"')))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("names", [CHINESE, SHORT, CODES])
def test_persons_of_any_script_with_several_records_are_left_out(tmp_path: Path, names: str, private: bool) -> None:
    """Short names were taken for codes, and became categories without a mark."""
    persons = names.split("|")
    for values in (persons * 8, [*persons * 8, *["unknown"] * 90]):
        found = line(suggestion(tmp_path, "xm", values, private=private), "xm")
        assert found.startswith("# xm: left out, its values look like persons with several records")
        assert not [name for name in persons if f'"{name}"' in found]


@pytest.mark.parametrize("names", FEW.values(), ids=FEW)
def test_few_persons_of_any_script_are_to_be_reviewed_and_never_listed(tmp_path: Path, names: str) -> None:
    persons = names.split("|")
    skewed = [name for place, name in enumerate(persons) for _ in range(24 + 12 * (place % 2))]
    for values in (persons * 24, [*skewed, "Tippfehlr", *["unknown"] * 200]):
        found = line(suggestion(tmp_path, "xm", values), "xm")
        assert found.startswith('xm = "category"  # ')
        assert found.endswith(f"{PERSONS_QUESTION}; REVIEW")
        text = suggestion(tmp_path, "xm", values, private=True)
        assert line(text, "xm").startswith("# xm = []  # left out, its values look like names of persons, or contain")
        for private in (False, True):
            text += suggestion(tmp_path, "xm", values, private=private, label="xm")
        assert not [name for name in persons if name in text]


@pytest.mark.parametrize("values", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_categories_are_suggested_without_a_question(tmp_path: Path, values: str) -> None:
    categories = values.split("|")
    text = suggestion(tmp_path, "kind", categories * 24)
    assert line(text, "kind") == 'kind = "category"'
    listed = tomllib.loads(suggestion(tmp_path, "kind", categories * 24, private=True))["data"]["columns"]["kind"]
    assert set(listed) >= set(categories) - {"unknown"}


def test_values_that_mention_a_person_are_to_be_reviewed_and_not_listed(tmp_path: Path) -> None:
    """In an earlier version, --private listed a remark with a name and a phone number that 12 records had."""
    for remark in (
        "lives with her daughter, tel. 0171 2345678",
        "lives with Anna Abel",
        "mail to abel@example.org",
        "seen by Frau Abel",
        "moved in on 3.4.2019",
        "call +43 1 5123456",
    ):
        values = [*["alone"] * 100, *["with others"] * 60, *[remark] * 12]
        assert PERSONS_QUESTION in line(suggestion(tmp_path, "home", values), "home")
        assert remark not in suggestion(tmp_path, "home", values, private=True)
        values = [*["alone"] * 100, *["with others"] * 60, remark]  # it becomes "other" before anything is sent
        assert PERSONS_QUESTION not in line(suggestion(tmp_path, "home", values), "home")


@pytest.mark.parametrize(
    "name",
    ["PatNr", "Pat.-Nr.", "Fallnr", "kennung", "Patientenname", "姓名", "患者姓名", "이름", "Фамилия", "Geboortedatum"],
)
def test_words_for_names_and_numbers_of_persons_are_known_in_other_languages(name: str) -> None:
    assert identifying_name(name, frequent=True)


@pytest.mark.parametrize("name", ["birth weight", "fall risk", "patient age", "年龄", "data source", "Fallzahl"])
def test_similar_words_are_no_identifiers(name: str) -> None:
    assert not identifying_name(name, frequent=True)


def data_file(name: str) -> Path:
    where = os.environ.get("CGD_DATA")
    if where is None or not (Path(where) / name).exists():
        pytest.skip(f"needs {name} in CGD_DATA")
    return Path(where) / name


@pytest.mark.parametrize("records", [500, 5000, 32561])
def test_columns_of_adult_are_suggested(tmp_path: Path, records: int) -> None:
    with gzip.open(data_file("adult/adult.data.gz"), "rt") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row][:records]
    names = (
        "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,capital-gain,"
        "capital-loss,hours-per-week,native-country,income"
    )
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([names.split(","), *rows])
    text = suggest_schema(tmp_path / "table.csv", "income")
    assert [*tomllib.loads(text)["data"]["columns"], "income"] == names.split(",")
    assert "REVIEW" not in text


def test_columns_of_credit_default_are_suggested(tmp_path: Path) -> None:
    with gzip.open(data_file("credit-default/UCI_Credit_Card.csv.gz"), "rt") as file:
        (tmp_path / "table.csv").write_text(file.read())
    text = suggest_schema(tmp_path / "table.csv", "default.payment.next.month")
    assert len(tomllib.loads(text)["data"]["columns"]) == 23  # without the ID
    assert "REVIEW" not in text


def test_columns_of_breast_cancer_are_suggested(tmp_path: Path) -> None:
    found = load_breast_cancer()
    with (tmp_path / "table.csv").open("w", newline="") as file:
        rows = [[*map(str, row), label] for row, label in zip(found.data, found.target, strict=True)]
        csv.writer(file).writerows([[*found.feature_names, "y"], *rows])
    text = suggest_schema(tmp_path / "table.csv", "y")
    assert tomllib.loads(text)["data"]["columns"] == dict.fromkeys(found.feature_names, "number")
    assert "REVIEW" not in text
