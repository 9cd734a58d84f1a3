"""Module facts: what a traced step takes for granted of the modules of its model.

Who learns, who is in training mode, which module is where, its hooks, and the numbers that a module
of torch reads: of a dropout its p.  Nobody runs these modules while ranks train by a plan, so what
the job's code changes there later is not followed.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from penstock import _compat

Facts = dict[str, object]

SINCE = "since the model was traced, and ranks go on as it was then"
_PLAIN = (bool, int, float, str, type(None))


def module_facts(model: nn.Module) -> Facts:
    """Return who learns, who is in training mode, which module is where, and its hooks."""
    facts: Facts = {}
    for name, parameter in model.named_parameters():
        facts[f"requires_grad of {name}"] = parameter.requires_grad
        facts[f"the hooks of {name}"] = _compat.num_gradient_hooks(parameter)
    for name, module in _compat.named_modules(model):
        facts[f"training of {name}"] = module.training
        facts[f"the class of {name}"] = type(module).__qualname__
        facts[f"the hooks of module {name}"] = _compat.hooks_of(module)
    return facts


def traced_facts(model: nn.Module) -> Facts:
    """Return these facts so that two models can be compared, and the numbers that torch reads."""
    facts = module_facts(model)
    for path, module in _compat.named_modules(model):
        facts[f"the hooks of module {path}"] = len(_compat.hooks_of(module))
        if type(module).__module__.startswith("torch."):
            own = ((n, v) for n, v in vars(module).items() if not n.startswith("_"))
            facts |= {f"{n} of {path}": v for n, v in own if isinstance(v, _PLAIN)}
    return facts


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    """Yield in words what is another fact afterwards, or is none."""
    for what, value in before.items():
        if what not in after:
            yield f"{what} is gone"
        elif after[what] != value:
            shown = isinstance(value, _PLAIN) and isinstance(after[what], _PLAIN)
            yield f"{what}: {value}, then {after[what]}" if shown else f"{what}: changed"
    yield from (f"{what} is new" for what in after.keys() - before.keys())
