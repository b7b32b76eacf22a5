"""How the site's reference reads docstrings (mkdocs.yml): those that a class takes from another, by
`__doc__ = Other.__doc__`."""

import griffe


class DocstringsOfOthers(griffe.Extension):
    """Gives such classes the docstring of the other."""

    def on_package(self, *, pkg, loader, **_):
        for cls in classes_in(pkg):
            taken = cls.members.get("__doc__")
            other, _, attribute = str(taken.value if taken else "").rpartition(".")
            if attribute == "__doc__":
                cls.docstring = loader.modules_collection[cls.resolve(other)].docstring


def classes_in(found):
    """The classes of a package or module, nested modules included."""
    for member in found.members.values():
        if member.is_alias:
            continue
        if member.is_class:
            yield member
        elif member.is_module:
            yield from classes_in(member)
