"""How an engine is served: what the command line and embedders may set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        served_names: what the model is called; the first is the one in answers. Empty for the name
            of the engine's folder.
        api_keys: any of them opens the API; empty leaves it open.
        max_body_bytes: longer requests are refused.
        body_timeout_s: in which a request must have come.
        request_timeout_s: in which an answer must be complete; None for any time.
        ping_s: after so long without an event, a stream sends a comment.
        max_choices: most answers to one request: `n`, times the number of prompts.
    """

    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    ping_s: float = 15.0
    max_choices: int = 32
