"""Reads: where code reads a name so that it may matter, by its syntax.

What only counts or collects does not matter: `self.calls += 1`, `losses.append(x)`, a value that
is printed, one that flows only into another which nobody reads.
"""

import ast
import linecache
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType

from torch import nn

Line = tuple[str, int]

# Methods that change their object, where nobody takes what they return.
CHANGES = frozenset(
    """put append appendleft extend extendleft insert add update clear pop popleft remove discard
    setdefault record observe reset seek truncate""".split()  # noqa: SIM905 - a list of them is longer
)
_RETURNS = frozenset(("pop", "popleft", "setdefault"))  # of these, what somebody may take
# Calls that only tell.
_TELLS = frozenset(
    """print log debug info warning warn error critical exception write writelines writerow
    writerows dump save savetxt flush display
    add_scalar add_scalars add_histogram set_postfix set_postfix_str set_description""".split()  # noqa: SIM905
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def read_at(name: str, codes: Iterable[CodeType]) -> Line | None:
    """Return the first line at which the value of variable or attribute `name` may matter."""
    return _SourceReader(tuple(codes)).read_at(name, frozenset())


def used_at(name: str, codes: Iterable[CodeType]) -> Line | None:
    """Return the first line that takes the value of `name`, be it for the next value of the same.

    Not one that only tells it.
    """
    for code in codes:
        for node in _nodes(code) if name in _words(code) else ():
            is_set = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
            if _is_named(node, name) and not (is_set or _writes(node) or _tells(_statement(node))):
                return code.co_filename, node.lineno
    return None


def read_by_any_name_at(codes: Iterable[CodeType]) -> Line | None:
    """Return the first line that reads an attribute whose name is computed: getattr(x, f"n{k}")."""
    for code in codes:
        for node in _nodes(code) if "getattr" in code.co_names else ():
            match node:
                case ast.Call(func=ast.Name(id="getattr"), args=[_, name, *_]):
                    if not isinstance(name, ast.Constant):
                        return code.co_filename, node.lineno
                case _:
                    pass
    return None


def reader_of(name: str, holder: str, place: str, codes: Collection[CodeType]) -> Line | None:
    """Return the line that reads a value by its name, its holder's, or one that is computed."""
    reads = read_at(name, codes) or (read_at(holder, codes) if holder else None)
    if reads is not None or not place.endswith(f".{name}"):
        return reads
    return read_by_any_name_at(c for c in codes if "-packages" not in c.co_filename)


def written_at(name: str, codes: Iterable[CodeType]) -> Line | None:
    """Return the first line that sets or changes variable or attribute `name`."""
    for code in codes:
        for node in _nodes(code):
            if _is_named(node, name) and _writes(node):
                return code.co_filename, node.lineno
    return None


def freezes_at(codes: Iterable[CodeType]) -> Line | None:
    """Return the first line that sets who learns: `x.requires_grad = y`, `x.requires_grad_(y)`.

    Not `x.requires_grad_()`, which is said of what a function makes for itself.
    """
    for code in codes:
        for node in _nodes(code):
            match node:
                case ast.Call(func=ast.Attribute(attr="requires_grad_"), args=args, keywords=named):
                    is_set = bool(args or named)
                case ast.Attribute(attr="requires_grad", ctx=ast.Store()):
                    is_set = True
                case _:
                    is_set = False
            if is_set:
                return code.co_filename, node.lineno
    return None


def is_given(name: str, function: FunctionType) -> bool:
    """Return whether a name is nothing to a function but an argument that its caller gives."""
    code, defaults = function.__code__, function.__defaults__ or ()
    given = {*code.co_varnames[: code.co_argcount - len(defaults)]}
    return name in given - {*code.co_names, *code.co_freevars}


def names_written(codes: Iterable[CodeType], methods: Collection[CodeType]) -> dict[str, Line]:
    """Return what functions set beyond their own variables: globals, and what these hold.

    methods:  those of which attributes of the first argument count as well.
    """
    found: dict[str, Line] = {}
    for code in codes:
        own = code.co_varnames[1:] if code in methods else code.co_varnames
        beyond = {*code.co_freevars, *code.co_names, *code.co_varnames[:1]} - {*own}
        for node in _nodes(code):
            if not isinstance(node, ast.Name | ast.Attribute) or not _writes(node):
                continue
            root: ast.AST = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            is_self = isinstance(node, ast.Name) and node.id in code.co_varnames[:1]
            if isinstance(root, ast.Name) and root.id in beyond and not is_self:
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                found.setdefault(name, (code.co_filename, node.lineno))
    return found


class _SourceReader:
    def __init__(self, codes: tuple[CodeType, ...]) -> None:
        self.codes = codes

    def read_at(self, name: str, through: Collection[str]) -> Line | None:
        for code in sorted(self.codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
            if name not in _words(code):
                continue
            if not _nodes(code):  # no source to look at
                return code.co_filename, code.co_firstlineno
            for node in _nodes(code):
                if isinstance(node, ast.Name) and name in code.co_varnames[_arguments(code) :]:
                    continue  # a variable of the function's own
                if _is_named(node, name) and self._matters(node, name, through):
                    return code.co_filename, node.lineno
        return None

    def _matters(self, node: ast.expr, name: str, through: Collection[str]) -> bool:
        is_set = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        if is_set or _writes(node):
            return False
        statement = _statement(node)
        if _tells(statement):
            return False
        if isinstance(statement, ast.If) and _is_within(node, statement.test):
            return not all(
                self._only_tells(one, name, through) for one in (*statement.body, *statement.orelse)
            )
        return not self._flows_on(statement, name, through)

    def _only_tells(self, statement: ast.stmt, name: str, through: Collection[str]) -> bool:
        if isinstance(statement, ast.Pass) or _tells(statement):
            return True
        if isinstance(statement, ast.If | ast.For | ast.With):
            inside = (*statement.body, *getattr(statement, "orelse", ()))
            return all(self._only_tells(one, name, through) for one in inside)
        return self._flows_on(statement, name, through)

    def _flows_on(self, statement: ast.AST, name: str, through: Collection[str]) -> bool:
        """Return whether a statement only sets attributes or globals that nobody reads."""
        targets = _targets(statement)
        names = [_kept_name(target) for target in targets]
        if not targets or None in names or any(_is_read_by_others(str(name)) for name in names):
            return False
        others = [one for one in names if one is not None and one != name and one not in through]
        return all(self.read_at(one, {*through, name}) is None for one in others)


def _is_read_by_others(name: str) -> bool:
    """Return whether torch or Python itself, as `__code__` of a function, reads an attribute."""
    return name in _read_by_torch() or (name.startswith("__") and name.endswith("__"))


@cache
def _read_by_torch() -> frozenset[str]:
    """Return attributes of modules, optimizers and tensors that code of torch reads."""
    kinds = (kind for kind in vars(nn).values() if isinstance(kind, type))
    named = (vars(kind).get("__constants__", ()) for kind in kinds)
    return frozenset(("data", "grad", "requires_grad", "training", "param_groups")).union(*named)


def _arguments(code: CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


def _targets(statement: ast.AST) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):  # of pairs, each of them
        return [one for target in statement.targets for one in getattr(target, "elts", [target])]
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr=method))):
            return [target] if method in CHANGES else []
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
        case _:
            return []


def _kept_name(target: ast.expr) -> str | None:
    """Return the name that an assignment sets for longer than the call; None for a local one."""
    match target:
        case ast.Subscript(value=inner) | ast.Call(func=inner):  # of a cache, what it returns
            return _kept_name(inner)
        case ast.Attribute(attr=name):
            return name
        case ast.Name(id=name) if _is_outer(target, name):
            return name
        case _:
            return None


def _is_outer(node: ast.AST, name: str) -> bool:
    """Return whether a name at `node` is a global or of an enclosing function."""
    function = _function(node)
    if function is None or name in _outer_names(function):
        return True
    own = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and _is_store(n)]
    return name not in (*own, *(n.arg for n in ast.walk(function) if isinstance(n, ast.arg)))


def _is_store(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _outer_names(function: ast.AST | None) -> set[str]:
    if function is None:
        return set()
    scopes = (n for n in ast.walk(function) if isinstance(n, ast.Global | ast.Nonlocal))
    return {name for scope in scopes for name in scope.names}


def _writes(node: ast.AST) -> bool:
    """Return whether a name stands where it, or what it holds, is set or changed."""
    if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return not isinstance(node, ast.Name) or node.id in _outer_names(_function(node))
    above = _parent(node)
    if isinstance(node, ast.Constant):  # vars(x)["name"] = 1
        return isinstance(above, ast.Subscript) and not isinstance(above.ctx, ast.Load)
    while isinstance(above, ast.Subscript) and above.value is node:
        if not isinstance(above.ctx, ast.Load):
            return True
        node, above = above, _parent(above)
    if not isinstance(above, ast.Attribute) or above.value is not node:
        return False
    if not isinstance(above.ctx, ast.Load):  # x.name = 1
        return True
    call = _parent(above)
    if not isinstance(call, ast.Call) or call.func is not above or above.attr not in CHANGES:
        return False
    outside = _parent(call)
    if isinstance(outside, ast.Lambda):  # lambda g: norms.append(g.norm())
        return outside.body is call and above.attr not in _RETURNS
    return isinstance(outside, ast.Expr)


def _tells(statement: ast.AST) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    called = call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _TELLS


def _is_named(node: ast.AST, name: str) -> bool:
    """Return whether a node is this variable or attribute, or a text that stands for it."""
    match node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found == name
        case ast.Constant(value=found):
            return found == name and _names_something(node)
        case _:
            return False


def _names_something(text: ast.Constant) -> bool:
    """Return whether a text is that of `getattr(x, text)`, `vars(x)[text]`, `globals()[text]`."""
    match _parent(text):
        case ast.Call(func=ast.Name(id="getattr")):
            return True
        case ast.Subscript(value=ast.Attribute(attr="__dict__")):
            return True
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars" | "globals"))):
            return True
        case _:
            return False


# -- source ---------------------------------------------------------------------------------------


@cache
def _words(code: CodeType) -> frozenset[str]:
    """Return the names and the text in a code object, and in those inside it."""
    words = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, str):
            words.add(constant)
        elif isinstance(constant, CodeType):
            words |= _words(constant)
    return frozenset(words)


@cache
def tree_of(file: str) -> ast.Module | None:
    """Return the syntax of a file; None without its source."""
    text = "".join(linecache.getlines(file))
    if not text:
        return None
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


@cache
def _nodes(code: CodeType) -> tuple[ast.expr, ...]:
    """Return the expressions of the function that a code object is; none without its source."""
    inside: list[ast.expr] = []
    for function in _functions_at(code.co_filename, code.co_firstlineno):
        inside += [one for one in _below(function) if isinstance(one, ast.expr)]
    return tuple(sorted(inside, key=lambda one: (one.lineno, one.col_offset)))


def _functions_at(file: str, line: int) -> Iterator[ast.AST]:
    """Yield the functions of a file that begin at a line; what holds that is all that is met."""
    tree = tree_of(file)
    todo: list[ast.AST] = [] if tree is None else [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, _Function) and _begins(node) == line:
            yield node
        for child in ast.iter_child_nodes(node):
            child.__dict__["above"] = node
            first = _begins(child) if isinstance(child, _Function) else getattr(child, "lineno", 0)
            if first <= line <= getattr(child, "end_lineno", line):
                todo.append(child)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all that are in it; each learns what it is in."""
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            child.__dict__["above"] = node
            todo.append(child)


def _begins(function: _Function) -> int:
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return min(one.lineno for one in (*decorators, function))


def _parent(node: ast.AST) -> ast.AST | None:
    return node.__dict__.get("above")


def _statement(node: ast.AST) -> ast.AST:
    """Return the statement that a node stands in; of a lambda, the lambda."""
    while not isinstance(node, ast.stmt | ast.Lambda):
        above = _parent(node)
        assert above is not None
        node = above
    return node


def _function(node: ast.AST) -> ast.AST | None:
    above = _parent(node)
    while above is not None and not isinstance(above, _Function):
        above = _parent(above)
    return above


def _is_within(node: ast.AST, whole: ast.AST) -> bool:
    inside: ast.AST | None = node
    while inside is not None:
        if inside is whole:
            return True
        inside = _parent(inside)
    return False
