"""House rules that a linter does not know, checked on the syntax tree. Each rule is first proven on a bad example."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from source_tree import PACKAGE, ROOT, modules, name_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
SWITCHES_FILE = PACKAGE / "environment" / "switches.py"
VARIABLES_FILE = PACKAGE / "environment" / "variables.py"
# Runs in the interpreter of vLLM, where draftline cannot be imported: it sets vLLM's variables itself.
VLLM_WORKER_FILE = PACKAGE / "evaluate" / "vllm_worker.py"
# Switches that hide a fault of the compiler instead of mending it.
HIDING_SWITCHES = {"force_compile_during_fx_trace", "suppress_errors", "error_on_nested_fx_trace"}
TORCH_SETTINGS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "torch.backends.")
SWITCH_SETTERS = {
    "set_stance", "set_float32_matmul_precision", "set_default_dtype", "use_deterministic_algorithms",
    "set_num_threads", "set_detect_anomaly", "patch",
}  # fmt: skip
ENVIRONMENT_READERS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

Rule = Callable[[ast.Module], Iterator[tuple[int, str]]]


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in functions(tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"


def many_parameters(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Exempt: a typer verb, whose parameters are options of the command line, and a Triton kernel, which cannot take
    records."""
    for node in functions(tree):
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS and not any(is_exempt(decorator) for decorator in node.decorator_list):
            yield node.lineno, f"{node.name} has {count} parameters; at most {MAX_PARAMETERS}"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_exempt(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return text.startswith("app.command(") or text.startswith("triton.jit")


def broad_excepts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            names = {name.strip() for name in caught.strip("()").split(",")}
            if names & {"", "Exception", "BaseException"}:
                yield node.lineno, f"except {caught or 'everything'} is broad"


def silenced_errors(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            names = {ast.unparse(argument) for argument in node.args}
            if names & {"Exception", "BaseException"}:
                yield node.lineno, "suppress of every exception"


def getattr_defaults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 2:
            yield node.lineno, "getattr with a default hides a misspelt or missing name"


def global_statements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def hiding_switches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Named as an attribute, a keyword or a string: all three reach the switch."""
    for node in ast.walk(tree):
        names = {
            ast.Attribute: lambda n: n.attr,
            ast.keyword: lambda n: n.arg or "",
            ast.Constant: lambda n: str(n.value).rpartition(".")[2],
        }.get(type(node))
        if names is not None and names(node) in HIDING_SWITCHES:
            yield node.lineno, f"torch switch {names(node)} outside environment/switches.py"


def switch_setters(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Assignments to torch's settings, and calls of what changes the whole process."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in (ast.unparse(target) for target in targets):
            if target.startswith(TORCH_SETTINGS):
                yield node.lineno, f"{target} is set outside environment/switches.py"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith("torch.") and name.rpartition(".")[2] in SWITCH_SETTERS:
                yield node.lineno, f"{name} is called outside environment/switches.py"


def environment_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_READERS and ast.unparse(node.value) == "os":
            yield node.lineno, f"os.{node.attr} outside environment/variables.py"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for name in (alias.name for alias in node.names if alias.name in ENVIRONMENT_READERS):
                yield node.lineno, f"os.{name} outside environment/variables.py"


RULES: dict[Rule, set[Path]] = {  # rule -> the files where it does not hold
    long_functions: set(),
    many_parameters: set(),
    broad_excepts: set(),
    silenced_errors: set(),
    getattr_defaults: set(),
    global_statements: set(),
    hiding_switches: {SWITCHES_FILE},
    switch_setters: {SWITCHES_FILE},
    environment_reads: {VARIABLES_FILE, VLLM_WORKER_FILE},
}

BROKEN: list[tuple[Rule, str]] = [
    (long_functions, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (many_parameters, "def f(a, b, c, d, e, *, g, h, i, j): ..."),
    (broad_excepts, "try: ...\nexcept: ..."),
    (broad_excepts, "try: ...\nexcept Exception as error: raise"),
    (broad_excepts, "try: ...\nexcept (OSError, BaseException): ..."),
    (silenced_errors, "with contextlib.suppress(Exception): ..."),
    (getattr_defaults, "getattr(config, 'rope_theta', 10000)"),
    (global_statements, "def f():\n    global cache"),
    (hiding_switches, "torch._dynamo.config.suppress_errors = True"),
    (hiding_switches, "config.patch(error_on_nested_fx_trace=False)"),
    (hiding_switches, "setattr(module, 'force_compile_during_fx_trace', True)"),
    (hiding_switches, "config.patch({'_dynamo.suppress_errors': True})"),
    (switch_setters, "torch._inductor.config.triton.cudagraphs = True"),
    (switch_setters, "torch.backends.cuda.matmul.allow_tf32 = True"),
    (switch_setters, "torch.compiler.set_stance('force_eager')"),
    (switch_setters, "with torch._dynamo.config.patch(cache_size_limit=64): ..."),
    (switch_setters, "torch.set_float32_matmul_precision('high')"),
    (environment_reads, "import os\nos.environ['A']"),
    (environment_reads, "import os\nos.getenv('A')"),
    (environment_reads, "from os import environ"),
]

FINE = """
class A:
    def f(self, a, b, c, d, e, g, h, i): ...
@app.command("eval")
def verb(a, b, c, d, e, g, h, i, j): ...
@triton.jit(do_not_specialize=["a"])
def kernel(a, b, c, d, e, g, h, i, j): ...
try: ...
except (OSError, ValueError): ...
getattr(module, name)
os.path.join("a", "b")
"""


@pytest.mark.parametrize(("rule", "source"), BROKEN)
def test_each_rule_finds_its_bad_example(rule: Rule, source: str) -> None:
    assert len(list(rule(ast.parse(source)))) == 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_rule_finds_fault_with_good_code(rule: Rule) -> None:
    assert list(rule(ast.parse(FINE))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    checked = [path for path in modules() if path not in RULES[rule]]
    found = [
        f"{name_of(path)}:{line}: {fault}"
        for path in checked
        for line, fault in rule(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(checked) > 20
    assert found == []


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_nothing_is_left_to_do() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    files = [*modules(), *sorted((ROOT / "tests").rglob("*.py"))]
    assert [name_of(path) for path in files if any(mark in path.read_text(encoding="utf-8") for mark in marks)] == []
