"""`fit`: plan at the first training step of a module, and again at each new kind of call."""

from scheduler_runtime.fitting.fit_entry import fit, plan_ahead, plans_of
from scheduler_runtime.fitting.forward import FittedForward
from scheduler_runtime.fitting.options import FitError, Fitted, Optimizers
from scheduler_runtime.fitting.retry_loss import attempt
