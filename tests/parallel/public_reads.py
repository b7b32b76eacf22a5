"""The questions that users may put to a compression at any time, on any rank alone: for each host's
cases. None may hang, or change a step."""

from typing import Any, Callable, Dict

READS: Dict[str, Callable[[Any], Any]] = {
    "config": lambda compression: compression.config,
    "repr": repr,
    # As debuggers do.
    "attributes": lambda compression: [
        getattr(compression, name, None) for name in dir(compression)
    ],
    "hasattr": lambda compression: hasattr(compression, "stats"),
    "stats": lambda compression: compression.stats(),
    "stats_by_tensor": lambda compression: compression.stats_by_tensor(),
    "record": lambda compression: compression.record(lambda record: None),
    "state_dict": lambda compression: compression.state_dict(),
    "switch_at": lambda compression: compression.switch("none", at=10**6),
}
