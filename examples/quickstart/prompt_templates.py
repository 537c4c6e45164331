"""Original prompt templates of the quickstart: code, explanations, word problems.

Everything here was written for this repository. A template is a sentence with `{slots}`; a table
says what may fill each slot. `draw` picks distinct fillings with a seeded generator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

Tables = dict[str, list[str]]

CODE_TEMPLATES = [
    "Write a Python function that {task}.",
    "Write a short Python function that {task}, and show one example call.",
    "Write a Python function with a docstring that {task}.",
    "How do I write a Python function that {task}?",
    "In Python, write a function that {task}. Explain it in one or two sentences.",
    'Complete this Python function:\n\n```python\ndef {name}({given}):\n    """{doc}"""\n```',
]
# One row: what the function does, its name, its parameters, its docstring.
TASK_TABLES: Tables = {
    "total": ["sum", "product", "average", "largest", "smallest", "count"],
    "kind": [
        "even numbers",
        "odd numbers",
        "negative numbers",
        "positive numbers",
        "multiples of three",
        "multiples of seven",
        "numbers below ten",
        "numbers above one hundred",
    ],
    "container": ["a list", "a tuple", "a set", "the values of a dictionary"],
    "word_kind": [
        "start with a capital letter",
        "end with the letter s",
        "contain the letter e",
        "are longer than five characters",
        "are shorter than four characters",
        "have no vowels",
        "occur only once",
    ],
    "text": ["a sentence", "a list of strings", "a text file", "a paragraph"],
    "unit": [
        "Celsius to Fahrenheit",
        "kilometres to miles",
        "kilograms to pounds",
        "minutes to hours and minutes",
        "litres to gallons",
        "degrees to radians",
        "bytes to megabytes",
        "metres to feet",
    ],
    "shape": ["circle", "triangle", "rectangle", "square", "trapezoid", "sphere", "cylinder"],
    "measure": ["area", "perimeter", "size"],
    "thing": [
        "bank account",
        "shopping cart",
        "library book",
        "student",
        "stopwatch",
        "playlist",
        "parking lot",
        "inventory",
    ],
    "puzzle": [
        "splits a list into chunks of a given size", "merges two sorted lists",
        "finds the second largest number in a list", "computes the running total of a list",
        "reverses the digits of a number", "checks whether a year is a leap year",
        "computes the n-th triangular number", "transposes a matrix", "flattens a list of lists",
        "swaps the keys and values of a dictionary", "groups words by their first letter",
        "finds the longest run of equal elements", "simulates rolling two dice",
        "draws a triangle of stars", "turns seconds into hours, minutes and seconds",
        "checks that a password is long enough", "interleaves two lists",
        "finds the missing number between 1 and n", "does a binary search in a sorted list",
        "sorts a list with bubble sort", "moves all zeros of a list to the end",
        "counts down from a number to zero", "prints a multiplication table",
        "makes an acronym of a phrase", "capitalises every word of a title",
        "rotates a list by k places", "finds the common items of two lists",
        "picks a random item from a list", "joins first and last names", "splits a bill with a tip",
    ],
    "order": ["by length", "in reverse order", "by their last letter", "without duplicates"],
}  # fmt: skip
TASK_ROWS = [
    (
        "returns the {total} of the {kind} in {container}",
        "{total}_of_{kind}",
        "numbers",
        "Return the {total} of the {kind} in {container}.",
    ),
    (
        "returns the words in {text} that {word_kind}",
        "words_that_{word_kind}",
        "words",
        "Return the words in {text} that {word_kind}.",
    ),
    (
        "counts how many words in {text} {word_kind}",
        "count_{word_kind}",
        "words",
        "Count the words in {text} that {word_kind}.",
    ),
    ("converts {unit}", "convert_{unit}", "value", "Convert {unit}."),
    (
        "computes the {measure} of a {shape}",
        "{shape}_{measure}",
        "*sides",
        "Compute the {measure} of a {shape}.",
    ),
    (
        "returns the words of {text} sorted {order}",
        "sort_{order}",
        "words",
        "Return the words of {text} sorted {order}.",
    ),
    (
        "prints a short report about a {thing} stored in a dictionary",
        "report_{thing}",
        "record",
        "Print a short report about a {thing}.",
    ),
    ("{puzzle}", "{puzzle}", "data", "A function that {puzzle}."),
    ("{puzzle}", "{puzzle}", "items", "This function {puzzle}."),
]

EXPLAIN_TEMPLATES = [
    "Explain {topic} in two or three sentences.",
    "Explain {topic} to a {listener} in a short paragraph.",
    "What is {topic}, and why does it matter? Keep it short.",
    "Give three short facts about {topic}.",
    "Write a short introduction to {topic} for a {listener}.",
    "What are the most common questions a {listener} has about {topic}? List three.",
    "Give {number} tips for {activity}.",
    "Write a short email to a {person} about {matter}.",
    "Write a short story about a {hero} who {deed}.",
    "Write a four-line poem about {topic}.",
    "What is the difference between {pair}? Answer briefly.",
    "Compare {pair} in one short paragraph for a {listener}.",
    "Imagine you are a {hero}. Describe your day in five sentences.",
    "Suggest a title and a first sentence for an article about {activity}.",
]
TOPICS = [
    "photosynthesis", "gravity", "inflation", "a rainbow", "the water cycle", "evolution",
    "electricity", "the moon's phases", "a computer virus", "democracy", "volcanoes",
    "the internet", "vaccines", "earthquakes", "recycling", "solar power", "black holes",
    "the heart", "sleep", "memory", "magnetism", "sound", "tides", "the ozone layer",
    "supply and demand", "a budget", "compound interest", "a database", "machine learning",
    "an algorithm", "encryption", "a web browser", "open source software", "climate change",
    "the food chain", "bees", "coral reefs", "migration of birds", "glaciers", "deserts",
    "the Roman Empire", "the printing press", "the Silk Road", "jazz", "impressionism",
    "chess", "the Olympic Games", "meditation", "friction", "atoms",
]  # fmt: skip
EXPLAIN_TABLES: Tables = {
    "topic": TOPICS,
    "pair": [
        "weather and climate", "a virus and a bacterium", "speed and acceleration",
        "a novel and a short story", "coffee and tea", "a list and a tuple in Python",
        "a planet and a star", "saving and investing", "an alligator and a crocodile",
        "a hypothesis and a theory", "a lake and a pond", "renting and buying a home",
        "RAM and a hard disk", "mass and weight", "a city and a village", "butter and margarine",
    ],
    "listener": ["ten-year-old", "grandparent", "new student", "busy manager", "curious traveller"],
    "number": ["three", "four", "five"],
    "activity": [
        "learning a language", "saving money", "cooking at home", "growing tomatoes",
        "sleeping better", "running a first marathon", "preparing for an interview",
        "writing clearly", "training a puppy", "packing for a trip", "reading more books",
        "working from home", "taking better photos", "starting a small garden",
        "remembering names", "speaking in public",
    ],
    "person": ["colleague", "landlord", "teacher", "neighbour", "customer", "friend"],
    "matter": [
        "a late delivery", "a change of meeting time", "a lost umbrella", "a birthday party",
        "a broken heater", "a new project", "a book you both like", "a day off",
    ],
    "hero": ["lighthouse keeper", "baker", "robot", "fox", "young painter", "sailor", "librarian"],
    "deed": [
        "finds an old map", "learns to whistle", "misses the last train", "helps a stranger",
        "repairs a clock", "gets lost in the fog", "makes an unusual friend", "keeps a secret",
    ],
}  # fmt: skip

WORD_PROBLEM_TEMPLATES = [
    "{name} has {a} {things}. {friend} gives {name} {b} more, and then {name} gives away {c}. "
    "How many {things} does {name} have now?",
    "A box holds {b} {things}. {name} fills {c} boxes and has {a} {things} left over. "
    "How many {things} are there in all?",
    "{name} buys {c} {things} for ${b} each and pays with a $200 bill. How much change is due?",
    "{name} reads {b} pages a day. How many pages has {name} read after {c} days, "
    "if {a} pages were read before?",
    "{name} and {friend} share {a} {things} equally with {c} others. "
    "How many does each person get, and how many are left over?",
    "On Monday {name} sold {a} {things}, on Tuesday {b} more than on Monday. "
    "How many {things} were sold on the two days together?",
]
WORD_PROBLEM_TABLES: Tables = {
    "name": ["Ada", "Bruno", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hanna", "Ines", "Jonas"],
    "friend": ["Karim", "Lena", "Mateo", "Nadia", "Oskar", "Priya", "Rosa", "Sami", "Tove", "Yuki"],
    "things": ["pencils", "marbles", "stickers", "oranges", "shells", "coins", "cookies", "beads"],
    "a": [str(n) for n in range(12, 95)],
    "b": [str(n) for n in range(3, 20)],
    "c": [str(n) for n in range(2, 10)],
}


def identifier(words: str) -> str:
    """A Python name made of a few words."""
    return "_".join("".join(c if c.isalnum() else " " for c in words).lower().split())


def fill(template: str, tables: Tables, rng: random.Random) -> str:
    """The template with every slot filled at random; a slot it does not have is drawn as well."""
    return template.format(**{slot: rng.choice(words) for slot, words in tables.items()})


def code_prompt(rng: random.Random) -> str:
    chosen = {slot: rng.choice(words) for slot, words in TASK_TABLES.items()}
    task, name, given, doc = (part.format(**chosen) for part in rng.choice(TASK_ROWS))
    return rng.choice(CODE_TEMPLATES).format(task=task, name=identifier(name), given=given, doc=doc)


def explain_prompt(rng: random.Random) -> str:
    return fill(rng.choice(EXPLAIN_TEMPLATES), EXPLAIN_TABLES, rng)


def word_problem(rng: random.Random) -> str:
    return fill(rng.choice(WORD_PROBLEM_TEMPLATES), WORD_PROBLEM_TABLES, rng)


WRITERS = {"code": code_prompt, "explain": explain_prompt, "word_problem": word_problem}


def draw(writer: str, *, seed: int) -> Iterator[str]:
    """Prompts of one writer, without end; a caller that wants distinct ones drops repeats."""
    rng = random.Random(f"{writer} {seed}")
    while True:
        yield WRITERS[writer](rng)
