"""Words that the generated tasks are made of."""

NAMES = tuple(
    "Ada Ben Clara David Emma Felix Greta Henry Ida Jonas Karin Leo Maria Nils Olga Peter Rosa "
    "Simon Tina Viktor Wanda Yusuf Zoe Amir Bianca Carlos Dana Elena Farid Hugo".split()
)
THINGS = tuple(
    "apples books coins stamps shells marbles pencils cards eggs stones tickets cookies roses "
    "candles buttons keys plates letters boxes ribbons".split()
)
CITIES = tuple(
    "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Athens Dublin Prague Warsaw Cairo Tokyo "
    "Sydney Boston Chicago Toronto Lima Delhi Nairobi Seoul Zurich Hamburg".split()
)
WORDS = tuple(
    "river stone cloud lamp green winter table music silver garden window paper yellow bridge "
    "forest candle mirror copper island thunder pocket engine ladder orange planet violin desert "
    "harbor kettle magnet needle pepper rabbit saddle tunnel valley walnut anchor basket circle "
    "dragon feather guitar hammer jacket lemon market ocean pillow rocket shadow tiger umbrella "
    "velvet whistle zebra autumn butter castle dinner evening flower golden honey iron jungle"
    .split()
)
TOPICS = tuple(
    "tea history|winter birds|train tickets|garden tools|paper maps|old bridges|sea stories|"
    "chess openings|bread recipes|night sky|wooden boats|city parks|wild flowers|stone walls"
    .split("|")
)
LANGUAGES = ("French", "German", "Spanish", "Italian", "Greek", "Polish", "Dutch", "Turkish")
