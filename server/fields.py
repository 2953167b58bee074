"""Request fields that are known and not honoured, and those that are not known.

A known field whose value asks for something is refused by name; one that asks for nothing (null,
the default) is let pass. Fields that nobody knows are ignored and listed, in a warning and in the
header x-ink-ignored-fields, so that clients may send what is newer than this server.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from inkrt.server.errors import unsupported

_log = logging.getLogger("inkrt.server")
_MOST_LISTED = 20

STATELESS = "this server keeps no answers; send store=false and the whole conversation as input"

Refused = Mapping[str, tuple[tuple[object, ...], str]]
# What asks for nothing, besides null; and why anything else is refused.
REFUSED: Refused = {
    "audio": ((), "this server makes no speech"),
    "best_of": ((1,), "ask for n answers and choose"),
    "chat_template": ((), "the engine has its own"),
    "continue_final_message": ((False,), "an answer begins anew"),
    "documents": (([],), "put them into a message"),
    "echo": ((False,), "the answer does not repeat the prompt"),
    "function_call": ((), "use tool_choice"),
    "functions": (([],), "use tools"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "guided_json": ((), "use structured_outputs"),
    "guided_regex": ((), "use structured_outputs"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "modalities": ((["text"],), "answers are text"),
    "prediction": ((), "drafts come from the engine"),
    "priority": ((0,), "requests are served in the order of their coming"),
    "prompt_logprobs": ((0, False), "log-probabilities are those of the answer"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "spaces_between_special_tokens": ((True,), "text is what the tokens say"),
    "store": ((False,), "nothing is stored"),
    "suffix": (("",), "the models continue text, they do not fill in"),
    "truncate_prompt_tokens": ((), "shorten the prompt instead"),
    "use_beam_search": ((False,), "there is no beam search"),
    "verbosity": (("medium",), "no model here knows it"),
    "web_search_options": ((), "there is no search"),
}
_CHATS_ONLY = "only chat completions have it"
REFUSED_BY_RESPONSES: Refused = {
    **REFUSED,
    "background": ((False,), STATELESS),
    "context_management": (([],), "shorten the input instead"),
    "conversation": ((), STATELESS),
    "include_reasoning": ((True,), _CHATS_ONLY),
    "logprobs": ((False,), _CHATS_ONLY),
    "max_completion_tokens": ((), "use max_output_tokens"),
    "max_tokens": ((), "use max_output_tokens"),
    "max_tool_calls": ((), "tools are called by the client"),
    "messages": ((), "use input"),
    "moderation": ((), "nothing is moderated"),
    "n": ((1,), "there is one response"),
    "previous_response_id": ((), STATELESS),
    "prompt": ((), "no prompts are stored; use input"),
    "reasoning_effort": ((), "use reasoning.effort"),
    "response_format": ((), "use text.format"),
    "return_token_ids": ((False,), _CHATS_ONLY),
    "store": ((False,), STATELESS),
    "stream_options.include_obfuscation": ((False,), "events are as long as what they say"),
    "structured_outputs": ((), "use text.format"),
    "text.verbosity": (("medium",), "no model here knows it"),
    "top_logprobs": ((0,), _CHATS_ONLY),
    "truncation": (("disabled",), "shorten the input instead"),
}
# About the client, not about the answer.
_WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "user")


def check_extra(
    extra: Mapping[str, Any] | None,
    request_id: str,
    *,
    refused: Refused = REFUSED,
    ignored: Sequence[str] = (),
) -> dict[str, str]:
    """Judge the fields that a body has beyond its model.

    Args:
        extra: these fields.
        request_id: for the log.
        refused: what is refused, and why.
        ignored: names of what else of the body is ignored.

    Returns:
        Headers for the answer.

    Raises:
        ApiError: a known field asks for what is not supported.
    """
    unknown = [*ignored]
    for name, value in (extra or {}).items():
        if name in refused:
            neutral, reason = refused[name]
            if value is not None and not any(
                type(value) is type(each) and value == each for each in neutral
            ):
                raise unsupported(name, reason)
        elif name not in _WITHOUT_EFFECT:
            unknown.append(name)
    if not unknown:
        return {}
    # Header and log take printable ASCII only.
    shown = [name.encode("ascii", "backslashreplace").decode()[:64] for name in unknown]
    listed = ", ".join(repr(name)[1:-1] for name in shown[:_MOST_LISTED])
    _log.warning("%s: ignored fields: %s", request_id, listed)
    return {"x-ink-ignored-fields": listed}
