"""Names of parameters, without the wrappers around their modules."""

# Where torch.compile and activation checkpointing put a module: none of a user's is called so.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


def bare_name(name: str) -> str:
    """A parameter's name as it is where its model, or the part that it is in, is neither compiled
    nor checkpointed."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
