"""Tools that the generated tool-call tasks declare, and requests for them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from inkrt.engines.nano.words import CITIES, LANGUAGES, NAMES, THINGS, TOPICS, WORDS


@dataclass(frozen=True, slots=True)
class Tool:
    """A function and how people ask for it.

    Attributes:
        description: what it says of itself.
        parameters: JSON type of every parameter; all are required.
        draw: arguments at random.
        requests: phrases with the parameters' names in braces.
    """

    name: str
    description: str
    parameters: dict[str, str]
    draw: Callable[[Random], dict[str, Any]]
    requests: tuple[str, ...]

    def declaration(self) -> dict[str, Any]:
        """The declaration as the chat API takes it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {k: {"type": t} for k, t in self.parameters.items()},
                    "required": sorted(self.parameters),
                },
            },
        }


def _time(random: Random) -> str:
    return f"{random.randrange(24):02}:{random.randrange(0, 60, 5):02}"


TOOLS = (
    Tool(
        "get_weather",
        "Get the weather of a city",
        {"city": "string", "days": "integer"},
        lambda r: {"city": r.choice(CITIES), "days": r.randint(1, 14)},
        (
            "What will the weather be in {city} for the next {days} days?",
            "Weather in {city}, {days} days please.",
            "Tell me the {days} day forecast for {city}.",
        ),
    ),
    Tool(
        "set_timer",
        "Start a timer",
        {"minutes": "integer", "label": "string"},
        lambda r: {"minutes": r.randint(1, 120), "label": r.choice(WORDS)},
        (
            "Set a timer of {minutes} minutes called {label}.",
            "Start a {minutes} minute timer named {label}.",
            "I need a timer, {label}, {minutes} minutes.",
        ),
    ),
    Tool(
        "send_message",
        "Send a short message to a person",
        {"to": "string", "text": "string"},
        lambda r: {"to": r.choice(NAMES), "text": " ".join(r.sample(WORDS, r.randint(2, 4)))},
        (
            'Send {to} the message "{text}".',
            'Write to {to}: "{text}"',
            'Please tell {to} "{text}".',
        ),
    ),
    Tool(
        "search",
        "Search documents",
        {"query": "string", "limit": "integer"},
        lambda r: {"query": f"{r.choice(TOPICS)} {r.choice(WORDS)}", "limit": r.randint(1, 50)},
        (
            "Search for {query} and show {limit} results.",
            "Find {limit} documents about {query}.",
            "Look up {query}, at most {limit} hits.",
        ),
    ),
    Tool(
        "translate",
        "Translate words",
        {"text": "string", "language": "string"},
        lambda r: {
            "text": " ".join(r.sample(WORDS, r.randint(1, 3))),
            "language": r.choice(LANGUAGES),
        },
        (
            'Translate "{text}" into {language}.',
            'How do you say "{text}" in {language}?',
            'Put "{text}" into {language}, please.',
        ),
    ),
    Tool(
        "add_event",
        "Add an event to the calendar",
        {"person": "string", "time": "string"},
        lambda r: {"person": r.choice(NAMES), "time": _time(r)},
        (
            "Add a meeting with {person} at {time}.",
            "Put {person} in my calendar at {time}.",
            "I meet {person} at {time}, note it.",
        ),
    ),
    Tool(
        "order_items",
        "Order items from the shop",
        {"item": "string", "count": "integer"},
        lambda r: {"item": r.choice(THINGS), "count": r.randint(2, 200)},
        (
            "Order {count} {item}.",
            "Please buy {count} {item} from the shop.",
            "We need {count} {item}, order them.",
        ),
    ),
    Tool(
        "set_light",
        "Set the brightness of a lamp",
        {"lamp": "string", "percent": "integer"},
        lambda r: {"lamp": r.choice(WORDS), "percent": r.randint(0, 100)},
        (
            "Set the {lamp} lamp to {percent} percent.",
            "Turn the {lamp} light to {percent}%.",
            "I want the {lamp} lamp at {percent} percent.",
        ),
    ),
    Tool(
        "find_route",
        "Find a way between two cities",
        {"start": "string", "end": "string"},
        lambda r: dict(zip(("start", "end"), r.sample(CITIES, 2), strict=True)),
        (
            "How do I get from {start} to {end}?",
            "Find a route from {start} to {end}.",
            "Show the way to {end}, I start in {start}.",
        ),
    ),
    Tool(
        "read_file",
        "Read lines of a file",
        {"path": "string", "lines": "integer"},
        lambda r: {
            "path": f"{r.choice(WORDS)}/{r.choice(WORDS)}.{r.choice(['txt', 'py', 'md'])}",
            "lines": r.randint(1, 99),
        },
        (
            "Show the first {lines} lines of {path}.",
            "Read {lines} lines from {path}.",
            "Open {path} and print {lines} lines.",
        ),
    ),
)
