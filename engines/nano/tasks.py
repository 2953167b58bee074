"""Generated chat tasks, each with an answer that is right and a key that tells it from others."""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from inkrt.engines.nano.chat import compact_json
from inkrt.engines.nano.tools import TOOLS
from inkrt.engines.nano.words import CITIES, NAMES, THINGS, WORDS

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One exchange.

    Attributes:
        kind: arithmetic, copy, tool_call, reasoning or passkey.
        key: the same for tasks with the same content, however they are worded.
        question: the user's text.
        reasoning: the model's, or "".
        answer: the model's text; of a tool call the JSON of {"args", "name"}.
        tools: declarations.
    """

    kind: str
    key: str
    question: str
    answer: str
    reasoning: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    def reply(self, *, think: bool = True) -> Message:
        """The assistant's message."""
        message: Message = {"role": "assistant", "content": self.answer}
        if self.kind == "tool_call":
            call = json.loads(self.answer)
            function = {"name": call["name"], "arguments": call["args"]}
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            }
        if self.reasoning and think:
            message["reasoning_content"] = self.reasoning
        return message


def arithmetic(random: Random) -> Task:
    """Add or subtract two numbers of up to three digits; no result is negative."""
    digits = random.choice([1, 2, 2, 2, 3, 3, 3])
    a, b = (random.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    sign = random.choice("+-")
    if sign == "-":
        a, b = max(a, b), min(a, b)
    phrases = ["What is {a} {s} {b}?", "{a} {s} {b} =", "Compute {a} {s} {b}.", "{a} {s} {b}?"]
    if sign == "+":
        phrases += ["Add {a} and {b}.", "What is the sum of {a} and {b}?"]
    else:
        phrases += ["Subtract {b} from {a}.", "What is {a} minus {b}?"]
    question = random.choice(phrases).format(a=a, b=b, s=sign)
    return Task("arithmetic", f"{a}{sign}{b}", question, str(a + b if sign == "+" else a - b))


def copy(random: Random) -> Task:
    """Repeat words, letters and digits, or names."""
    form = random.randrange(4)
    if form == 0:
        text = " ".join(random.choices(WORDS, k=random.randint(3, 24)))
    elif form == 1:
        size = random.randint(4, 24)
        text = "".join(random.choices(string.ascii_lowercase + string.digits, k=size))
    elif form == 2:
        text = ", ".join(random.choices(NAMES + CITIES, k=random.randint(3, 16)))
    else:
        text = " ".join(str(random.randrange(1000)) for _ in range(random.randint(3, 12)))
    phrase = random.choice(
        ["Repeat: {}", "Copy this exactly: {}", "Say this again: {}", "Echo the text: {}"]
    )
    return Task("copy", text, phrase.format(text), text)


def tool_call(random: Random) -> Task:
    """Call one of three to five tools."""
    declared = random.sample(TOOLS, random.randint(3, 5))
    tool = random.choice(declared)
    arguments = tool.draw(random)
    answer = compact_json({"name": tool.name, "args": arguments})
    question = random.choice(tool.requests).format(**arguments)
    return Task("tool_call", answer, question, answer, "", tuple(t.declaration() for t in declared))


def reasoning(random: Random) -> Task:
    """Two steps, written down before the answer."""
    return random.choice([_story, _total, _largest, _letter])(random)


def _story(random: Random) -> Task:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    a, b = random.randint(5, 60), random.randint(2, 40)
    c = random.randint(1, a + b)
    question = random.choice(
        [
            "{n} has {a} {t}, finds {b} more and gives away {c}. How many {t} are left?",
            "{n} owns {a} {t}. {n} buys {b} {t} and loses {c}. How many {t} does {n} have now?",
            "There are {a} {t}. {n} adds {b} and takes {c}. How many {t} are there?",
        ]
    ).format(n=name, a=a, b=b, c=c, t=thing)
    steps = f"{a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}."
    return Task("reasoning", f"{a}+{b}-{c}", question, str(a + b - c), steps)


def _total(random: Random) -> Task:
    names, thing = random.sample(NAMES, 3), random.choice(THINGS)
    counts = [random.randint(2, 50) for _ in names]
    parts = [f"{name} has {count}" for name, count in zip(names, counts, strict=True)]
    question = (
        f"{parts[0]} {thing}, {parts[1]} and {parts[2]}. How many {thing} have they together?"
    )
    a, b, c = counts
    steps = f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}."
    return Task("reasoning", f"{a}+{b}+{c}", question, str(a + b + c), steps)


def _largest(random: Random) -> Task:
    numbers = random.sample(range(10, 1000), 4)
    least = random.random() < 0.5
    pick = min if least else max
    steps, best = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{best} or {number}: {pick(best, number)}.")
        best = pick(best, number)
    listed = ", ".join(map(str, numbers))
    question = f"Which number is the {'smallest' if least else 'largest'}: {listed}?"
    return Task("reasoning", f"{pick.__name__} {listed}", question, str(best), " ".join(steps))


def _letter(random: Random) -> Task:
    words = random.sample(WORDS, random.randint(4, 7))
    place = random.randrange(len(words))
    steps = " ".join(f"{i + 1} {word}." for i, word in enumerate(words[: place + 1]))
    question = f"What is word number {place + 1} of this list: {', '.join(words)}?"
    return Task("reasoning", f"{place} {' '.join(words)}", question, words[place], steps)


def passkey(random: Random, before: str, between: str) -> Task:
    """Find a number far back in a text.

    Args:
        random: where numbers and words come from.
        before: text in front of the number.
        between: text between the number and the question.
    """
    key = str(random.randrange(10000, 100000))
    hidden, question = random.choice(
        [
            ("The pass key is {}. Remember it.", "What is the pass key?"),
            ("Remember this number: {}.", "Which number should you remember?"),
            ("The secret code is {}.", "What is the secret code?"),
        ]
    )
    text = "\n".join(part for part in (before, hidden.format(key), between, question) if part)
    return Task("passkey", key, text, key)


GENERATORS: dict[str, Callable[[Random], Task]] = {
    "arithmetic": arithmetic,
    "copy": copy,
    "tool_call": tool_call,
    "reasoning": reasoning,
}


def fresh(kind: str, random: Random, taken: frozenset[str] = frozenset()) -> Task:
    """A task whose content is none of the `taken` ones, given as "kind key"."""
    while True:
        task = GENERATORS[kind](random)
        if f"{kind} {task.key}" not in taken:
            return task


def small_talk(random: Random) -> tuple[list[Message], list[Message]]:
    """How a conversation begins and how it ends: a name is told, and asked for later."""
    name, city = random.choice(NAMES), random.choice(CITIES)
    begin = [
        {"role": "user", "content": f"Hello, my name is {name} and I live in {city}."},
        {"role": "assistant", "content": f"Hello, {name}. How can I help you?"},
    ]
    question, answer = random.choice(
        [("What is my name?", f"Your name is {name}."), ("Where do I live?", f"In {city}.")]
    )
    end = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return begin, end
