"""Words of ordinary categories in some languages, so that `cgd schema` does not take them for names of persons."""

from __future__ import annotations

import unicodedata


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text, as `folded` gives them."""
    return frozenset(map(folded, text.split()))


def folded(word: str) -> str:
    """Return a word in lower case, without accents.

    Examples:
        >>> folded("MÄRZ"), folded("Łódź"), folded("Größe")
        ('marz', 'lodz', 'grosse')
    """
    parts = unicodedata.normalize("NFD", word.casefold())
    plain = "".join(each for each in parts if not unicodedata.combining(each))
    return unicodedata.normalize("NFC", plain).translate(_STROKES)


_STROKES = str.maketrans("łøđı", "lodi")

# Values that stand for a missing or any other value; they may be frequent in a column of names.
NO_ANSWER = word_set(
    "yes no none other others unknown missing ja nein keine keiner andere anderer sonstige sonstiges unbekannt oui non "
    "aucun autre autres inconnu si otro otra otros ninguno desconocido nessuno altro sconosciuto 是 否 有 无 其他 未知 "
    "不详"
)
ORDINARY_WORDS = NO_ANSWER | word_set(
    # days, months, seasons
    "monday tuesday wednesday thursday friday saturday sunday montag dienstag mittwoch donnerstag freitag samstag "
    "sonnabend sonntag lundi mardi mercredi jeudi vendredi samedi dimanche lunes martes miércoles jueves viernes "
    "sábado domingo january february march april may june july august september october november december januar "
    "jänner februar märz mai juni juli oktober dezember janvier février mars avril juin juillet août septembre octobre "
    "novembre décembre enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre mon "
    "tue wed thu fri sat sun jan feb mar apr jun jul aug sep oct nov dec spring summer autumn fall winter frühling "
    "sommer herbst printemps été automne hiver primavera verano otoño invierno morning noon evening night 春季 夏季 "
    "秋季 冬季 星期一 星期二 星期三 星期四 星期五 星期六 星期日 周一 周二 周三 周四 周五 周六 周日 "
    # colours, directions
    "red green blue yellow black white brown grey gray orange purple pink rot grün blau gelb schwarz weiss braun grau "
    "lila rosa rouge vert bleu jaune noir blanc brun gris rojo verde azul amarillo negro blanco marrón north south "
    "east west northeast northwest southeast southwest central nord süd ost west sud est ouest norte sur este oeste "
    "left right links rechts gauche droite izquierda derecha upper lower middle top bottom front back "
    # countries
    "austria belgium denmark finland france germany italy netherlands norway poland portugal spain sweden switzerland "
    "japan china india brazil canada mexico ireland england scotland greece hungary turkey russia ukraine cuba jamaica "
    "haiti columbia ecuador peru vietnam philippines thailand taiwan iran cambodia laos österreich schweiz deutschland "
    "frankreich italien spanien polen niederlande belgien schweden norwegen dänemark finnland ungarn griechenland "
    "türkei autriche belgique suisse allemagne italie espagne pologne suède norvège danemark alemania francia italia "
    "españa suiza suecia polonia noruega 中国 美国 日本 德国 法国 英国 韩国 俄罗斯 西班牙 意大利 "
    # wards and kinds of medicine
    "surgery elective urgent newborn observation surgical medical cardiology oncology neurology urology radiology "
    "paediatrics pediatrics orthopaedics orthopedics psychiatry dermatology gynaecology gynecology nephrology "
    "pneumology haematology hematology emergency intensive medicine internal maternity outpatient inpatient ward unit "
    "clinic department hospital chirurgie kardiologie onkologie neurologie urologie radiologie pädiatrie orthopädie "
    "psychiatrie dermatologie gynäkologie innere notaufnahme station ambulanz geriatrie cardiologie oncologie "
    "pédiatrie orthopédie dermatologie gynécologie urgences service cirugía cardiología oncología neurología urología "
    "radiología pediatría ortopedia psiquiatría dermatología ginecología urgencias "
    # states of patients, degrees
    "low medium high very mild moderate severe critical normal abnormal positive negative stable good fair poor "
    "excellent bad better worse same never former current always often sometimes rarely daily weekly monthly niedrig "
    "mittel hoch sehr leicht mässig schwer kritisch auffällig positiv negativ stabil gut schlecht nie selten manchmal "
    "oft immer täglich faible moyen élevé très léger modéré sévère stable bon mauvais jamais rarement parfois souvent "
    "toujours bajo medio alto muy leve moderado grave normal bueno malo nunca raramente veces siempre stage grade "
    "class type group level category phase degree score stadium grad klasse typ gruppe stufe stade classe niveau "
    "groupe etapa grado clase tipo grupo nivel "
    # marriage, households, education, work
    "single married divorced widowed separated spouse absent husband wife child children unmarried relative partner "
    "ledig verheiratet geschieden verwitwet getrennt verpartnert célibataire marié mariée divorcé divorcée veuf veuve "
    "séparé séparée pacsé soltero soltera casado casada divorciado divorciada viudo viuda separado separada 未婚 已婚 "
    "离婚 离异 丧偶 再婚 同居 primary secondary preschool kindergarten elementary school college university bachelor "
    "bachelors master masters doctorate diploma degree graduate graduated undergraduate apprenticeship training "
    "hauptschule realschule gymnasium abitur lehre ausbildung hochschule universität promotion meister primaire "
    "collège lycée baccalauréat licence doctorat université primaria secundaria bachillerato universidad licenciatura "
    "maestría doctorado 小学 初中 高中 中专 大专 本科 硕士 博士 文盲 employed unemployed retired student worker "
    "employee self clerk manager technician services management housemaid entrepreneur homemaker farmer teacher nurse "
    "engineer sales private public federal local state government military angestellt arbeitslos selbständig rentner "
    "schüler beamter arbeiter hausfrau employé ouvrier retraité étudiant chômeur cadre agriculteur artisan empleado "
    "desempleado jubilado estudiante obrero autónomo 农民 工人 学生 教师 医生 退休 干部 职员 male female man woman boy "
    "girl diverse männlich weiblich divers homme femme hombre mujer 男性 女性 own rent mortgage house apartment flat "
    "car furniture radio television business education repairs vacation retraining cash credit card bank "
    # words that join or compare
    "not and or with without of in at all than less more over under about before after from to only und "
    "oder mit ohne nicht nur vor nach et ou avec sans pas con sin day week month year times any some "
    # diseases, ways to give a drug, tissues
    "diabetes hypertension asthma copd cancer stroke pneumonia sepsis heart lung liver kidney brain skin breast colon "
    "prostate blood bone oral intravenous subcutaneous inhaled topical rectal tablet capsule injection herz lunge "
    "leber niere gehirn haut brust dickdarm blut knochen coeur poumon foie rein cerveau peau sein corazón pulmón "
    "hígado riñón cerebro piel mama 高血压 糖尿病 冠心病 哮喘 正常 异常 阳性 阴性 轻度 中度 重度 良好 一般 很好 较差 "
    "从不 偶尔 经常"
)
# Endings of drugs, diseases, kinds of medicine and abstract words; few names of persons have them.
ORDINARY_ENDINGS = tuple(
    word_set(
        "pril sartan statin olol azole azol cillin mycin formin oxacin parin tinib gliptin profen amol dipine zepam "
        "spirin thyroxin noma sarcoma lymphoma tumor tumour karzinom itis osis emia ämie logy logie logia ectomy pathy "
        "pathie ation ición ación ität keit heit schaft ness ency infarction infarkt fraktur fracture skopie scopy"
    )
)
# Last characters of Chinese and Japanese words for kinds, places and diseases; few given names end with them.
ORDINARY_CHARACTERS = "科病症级期型色类区市省县国族岁段组院室性炎癌部門級類県国"


def is_ordinary(text: str) -> bool:
    """Return whether a text has a word of an ordinary category.

    Examples:
        >>> is_ordinary("Stage II"), is_ordinary("Märzen"), is_ordinary("内科"), is_ordinary("Keller")
        (True, False, True, False)
    """
    words = "".join(each if each.isalnum() else " " for each in folded(text)).split()
    ordinary = any(word in ORDINARY_WORDS or word.endswith(ORDINARY_ENDINGS) for word in words)
    return ordinary or text.endswith(tuple(ORDINARY_CHARACTERS))
