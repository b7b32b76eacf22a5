"""The package's shape: imports point one way, functions are short, and nothing depends on torch's defaults."""
import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "horovod_compress"
LINES = 45
# Each may import those before it.
LAYERS = [
    ["version", "trials"],
    ["kernels"],
    ["requests"],
    ["handshake", "wire"],
    ["split"],
    ["compressors"],
    ["plan", "step", "transport", "hosts"],
    ["checkpoint", "driver"],
    ["exchange", "recording"],
    ["lockstep"],
    ["simulate", "bench", "models", "cost", "report"],
    ["prediction"],
    ["scaling"],
    ["binding"],
    ["elastic", "updates", "choice"],
    ["torch", "tensorflow"],
    ["check"],
    ["cli"],
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem not in ("__init__", "__main__"))


def part_of(path):
    """The module or folder of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Absolute names of all that a file imports of this package, wherever it does."""
    package = ["horovod_compress", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            yield from ([".".join([*base, alias.name]) for alias in node.names])
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (name for name in names if name.split(".")[0] == "horovod_compress")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    level = {part: i for i, parts in enumerate(LAYERS) for part in parts}
    part = part_of(path)
    for name in imported(path):
        other = name.split(".")[1]
        if other != part and other in level:
            below = level[other] < level[part] or (part, other) in (("driver", "checkpoint"),)
            assert below, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_are_short(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno - node.lineno >= LINES}
    assert not long


# torch's functions whose results have the default dtype, or are on the default device, where that is not said.
MADE_BY_TORCH = {
    "Tensor", "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "complex", "empty", "empty_permuted", "empty_strided",
    "eye", "frombuffer", "full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}


def made_by_torch(path):
    """(line, name, keywords) of each call of such a function."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "torch" and not node.level]
    alone = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, name = node.func, None
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "torch":
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
