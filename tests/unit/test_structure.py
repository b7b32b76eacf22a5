"""Imports point one way, functions are short, and no tensor has torch's default dtype or device."""

import ast
import graphlib
import importlib.util
import pathlib
import subprocess
import sys

from horovod_compress.compressors.base import Compressor

PACKAGE = pathlib.Path(__file__).parents[2] / "horovod_compress"
LINES = 60
# Each may import those before it.
LAYERS = [
    ["version"],
    ["kernels"],
    ["protocol"],
    ["compressors", "transport"],
    ["engine"],
    ["session", "decentralized"],
    ["torch_common"],
    ["torch_distributed"],
    ["torch", "tensorflow", "ddp", "fsdp"],
    ["tools"],
]
FILES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")
)


def part_of(path):
    """The module or folder of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Absolute names of all that a file imports of this package, wherever it does."""
    package = ["horovod_compress", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (
                node.module.split(".") if node.module else []
            )
            yield from ([".".join([*base, alias.name]) for alias in node.names])
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            yield from (name for name in names if name.split(".")[0] == "horovod_compress")


def upward(path):
    """The imports of a file that do not point to a layer below its own."""
    level = {part: i for i, parts in enumerate(LAYERS) for part in parts}
    part = part_of(path)
    for name in imported(path):
        other = name.split(".")[1]
        below = level.get(other, -1) < level.get(part, len(LAYERS))
        if other != part and not below:
            yield f"{path.relative_to(PACKAGE)} imports {name}"


def test_imports_point_one_way():
    assert not [found for path in FILES for found in upward(path)]


def test_what_is_imported_is_there():
    """mypy has to pass over modules that it does not find, because frameworks are not there."""

    def is_there(name):
        place = PACKAGE.parent.joinpath(*name.split("."))
        return place.with_suffix(".py").exists() or (place / "__init__.py").exists()

    # A module, or a name in one.
    missing = {
        name
        for path in FILES
        for name in imported(path)
        if not is_there(name) and not is_there(name.rpartition(".")[0])
    }
    # Which is built.
    assert missing <= {"horovod_compress.kernels.native._native.*"}


def test_no_file_imports_itself_by_way_of_others():
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES}
    needs = {}
    for path in FILES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found = {part for its in imported(path) for part in (its, its.rpartition(".")[0])}
        needs[name] = found & names - {name}
    # Raises CycleError, which says where.
    graphlib.TopologicalSorter(needs).prepare()


# The files that name a feature. A prediction of `exchange=split` asks that feature.
NAMED_IN = {
    "hosts": {"engine/wrappers.py"},
    "split": {"engine/wrappers.py", "tools/loads.py"},
    "loss_scale": {"engine/features.py", "torch_common/steps.py", "tensorflow/exchange.py"},
    "discard": {"session/session.py"},
    "recording": {
        "session/bound.py",
        "session/session.py",
        "tensorflow/callbacks.py",
        "tools/report.py",
    },
}


def test_features_are_known_where_they_are_named_and_nowhere_else():
    """So each can be deleted with its file and these lines."""
    found = {feature: set() for feature in NAMED_IN}
    for path in FILES:
        for name in imported(path):
            room, _, rest = name.removeprefix("horovod_compress.").partition(".")
            feature = rest.partition(".")[0]
            if room == "engine" and feature in found:
                found[feature].add(path.relative_to(PACKAGE).as_posix())
    assert found == NAMED_IN


def test_the_contract_of_an_algorithm_is_small():
    """Methods of groups are as those of one tensor."""
    names = [name for name in dir(Compressor) if not name.startswith("_")]
    names = [name for name in names if not name.endswith("_all")]
    assert len(names) <= 21, names


def classes():
    """{(file, name): node} of the package."""
    return {
        (path, node.name): node
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def bases_of(key, known):
    """The classes of the package that one is derived from, in any number of steps."""
    path, name = key
    found = []
    for base in known[key].bases:
        name = getattr(base, "id", getattr(base, "attr", None))
        named = [each for each in known if each[1] == name and each != key]
        # Of several with one name that of the same file, else of the same folder.
        named.sort(key=lambda each: (each[0] != path, each[0].parent != path.parent))
        found += [each for each in named[:1] for each in (each, *bases_of(each, known))]
    return list(dict.fromkeys(found))


def methods_of(key, known):
    return [
        node
        for each in (key, *bases_of(key, known))
        for node in known[each].body
        if isinstance(node, ast.FunctionDef)
    ]


# Lines of methods, methods, and bases. An algorithm's are those of the contract, too.
LIMITS = {"compressors": (360, 38, 5), None: (400, 30, 2)}
# Those that are larger, and may not grow.
LARGER = {
    "GraphExchange": (410, 35, 1),
    "HostParts": (310, 33, 2),
}


def test_an_object_can_be_held_in_mind():
    """What is measured is the class with all bases of this package."""
    known, found = classes(), {}
    for key in known:
        methods = methods_of(key, known)
        lines = sum(node.end_lineno - node.lineno + 1 for node in methods)
        size = lines, len({node.name for node in methods}), len(bases_of(key, known))
        most = LARGER.get(key[1], LIMITS.get(part_of(key[0]), LIMITS[None]))
        if methods and any(its > limit for its, limit in zip(size, most)):
            found[key[1]] = size
    assert not found


def test_functions_are_short():
    functions = [
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    lines = {
        f"{path.name}: {node.name}": node.end_lineno - node.lineno + 1 for path, node in functions
    }
    assert not {name: count for name, count in lines.items() if count > LINES}


def test_docstrings_begin_with_a_verb_or_a_noun():
    """And not with a clause in the place of one."""
    found = []
    for folder in (PACKAGE, PACKAGE.parent / "benchmarks", PACKAGE.parent / "scripts"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    first = (ast.get_docstring(node) or "-").split()[0]
                    if first in ("What", "Whether", "Which"):
                        found.append(f"{path.relative_to(PACKAGE.parent)}:{node.body[0].lineno}")
    assert not found, "\n".join(found)


WITHOUT_HOROVOD = """
import importlib.util, runpy, sys
sys.modules["horovod"] = None
for name in sys.argv[2:]:
    importlib.import_module(name)
if importlib.util.find_spec("torch"):
    sys.argv = [sys.argv[1], "--help"]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_all_but_ports_for_horovod_imports_without_it():
    """And so does, where PyTorch is, the benchmark of kernels on a GPU."""
    files = [path.relative_to(PACKAGE.parent) for path in FILES]
    # Of what needs Horovod, and of what needs Triton.
    left_out = {"torch", "tensorflow", "elastic.py", "device"}
    if not importlib.util.find_spec("torch"):
        left_out |= {
            "torch_common",
            "torch_distributed",
            "ddp",
            "fsdp",
            "landing.py",
            "cluster.py",
            "job.py",
        }
    files = [file for file in files if not file.stem.startswith("__")]
    modules = [
        ".".join(file.with_suffix("").parts) for file in files if not left_out & set(file.parts)
    ]
    assert "horovod_compress.engine.exchange" in modules
    benchmark = PACKAGE.parent / "benchmarks" / "gpu.py"
    command = [sys.executable, "-c", WITHOUT_HOROVOD, benchmark, *modules]
    done = subprocess.run(command, capture_output=True, text=True)
    shown = "--models" in done.stdout
    assert done.returncode == 0 and shown == bool(importlib.util.find_spec("torch")), done.stderr


# torch's functions whose results have the default dtype or device, where that is not said.
MADE_BY_TORCH = {
    "Tensor",
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "complex",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "frombuffer",
    "full",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}


def made_by_torch(path):
    """(line, name, keywords) of each call of such a function."""
    tree = ast.parse(path.read_text())
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and not node.level
    ]
    alone = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, name = node.func, None
            if (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and function.value.id == "torch"
            ):
                name = function.attr
            elif isinstance(function, ast.Name):
                name = alone.get(function.id)
            if name in MADE_BY_TORCH:
                yield node.lineno, name, {keyword.arg for keyword in node.keywords}


def test_torchs_default_dtype_and_device_are_never_taken():
    """Users change them. What is made out of another tensor has that one's."""
    found = [(path.name, *call) for path in FILES for call in made_by_torch(path)]
    assert len(found) > 20
    assert not [call for call in found if not {"dtype", "device"} <= call[-1]]
