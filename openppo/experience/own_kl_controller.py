"""A user's controller of the KL coefficient: a class of a file, its numbers checked and its state in checkpoints."""

import math
from typing import Any

from openppo.config import KLConfig
from openppo.config.fields import declared_options, spelling
from openppo.experience.kl_controller import AdaptiveKLController, FixedKLController
from openppo.user_code import errors_of, load_callable, parameters_among

FLAG = "--kl_controller"
_OPTIONS = ("init_kl_coef", "kl_target", "kl_horizon")
"""Parameters that get the value of an option."""


class OwnKLController:
    """A user's controller, made by the class or function that ``options.kl_controller`` names.

    It has ``value``, the coefficient, and ``update(current, n_steps)``, called after each global step with the KL per
    action token of ``n_steps`` samples. Its state is that of its ``state_dict`` and ``load_state_dict``, else all its
    attributes, as JSON. ``ValueError`` names the flag, its value and the remedy.
    """

    def __init__(self, options: KLConfig) -> None:
        location = options.kl_controller
        assert location is not None
        self.where = f"{FLAG} {location}"
        make = load_callable(location, FLAG)
        names = parameters_among(make, _OPTIONS, self.where)
        values = vars(options)
        declared = declared_options(KLConfig)
        for name in _OPTIONS[1:]:
            if values[name] != declared[name].default and name not in names:
                raise ValueError(
                    f"{spelling(declared[name])} {values[name]}: {self.where} has no parameter {name}. Leave the "
                    "option out, or add it."
                )

        with errors_of(self.where, "when it was made"):
            self.controller: Any = make(**{name: values[name] for name in names})
        for name in ("value", "update"):
            if not hasattr(self.controller, name):
                kind = type(self.controller).__name__
                raise ValueError(
                    f"{self.where}: a {kind} has no {name}. Give it value and update(current, n_steps)."
                )

    @property
    def value(self) -> float:
        """The coefficient; ``ValueError`` unless it is a finite number that is not negative."""
        value = self.controller.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise ValueError(
                f"{self.where}: its value is {value!r}. A coefficient is a finite float that is not negative."
            )
        return float(value)

    def update(self, current: float, n_steps: int) -> None:
        """Pass on the KL per action token of ``n_steps`` samples, unless it is not finite."""
        if math.isfinite(current):
            self.controller.update(current, n_steps)

    def state_dict(self) -> dict[str, Any]:
        """State for ``load_state_dict``, as JSON."""
        if hasattr(self.controller, "state_dict"):
            return dict(self.controller.state_dict())
        return dict(vars(self.controller))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of an earlier run."""
        if hasattr(self.controller, "load_state_dict"):
            self.controller.load_state_dict(state)
        else:
            vars(self.controller).update(state)


def make_kl_controller(options: KLConfig) -> FixedKLController | OwnKLController:
    """Make the controller of options: that of a file, one for ``--kl_target``, or a fixed coefficient."""
    if options.kl_controller is not None:
        return OwnKLController(options)
    if options.kl_target is None:
        return FixedKLController(options.init_kl_coef)
    return AdaptiveKLController(
        options.init_kl_coef, target=options.kl_target, horizon=options.kl_horizon
    )
