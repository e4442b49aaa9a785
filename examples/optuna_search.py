"""Search a batch size, a learning rate and a decay with Optuna (pip install optuna); runs that lag are stopped early.

    python examples/optuna_search.py

    ... trials, ... of them pruned
    best: top-1 ... % with batch_size ..., learning_rate ..., weight_decay ...
    headrace board ...

A trial is an ordinary run: the board shows them all, with columns of the options in which they differ.
"""

import argparse
import tempfile

import optuna

import headrace as hr


class Prune(hr.Callback):
    """Reports each validation to Optuna, and stops the run where Optuna would."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_validation_end(self, event: hr.ValidationEvent) -> str | None:
        self.trial.report(event.accuracy, event.step)
        return "pruned by Optuna" if self.trial.should_prune() else None


def trained(trial: optuna.Trial, epochs: int, runs: str) -> float:
    """Train with what the trial proposes, and return the best accuracy."""
    model = hr.Model("toy_model_bn", log_dir=runs, run_name=f"trial_{trial.number}", seed=trial.number)
    run = model.fit(
        "digits",
        epochs=epochs,
        batch_size=trial.suggest_categorical("batch_size", [32, 64]),
        learning_rate=trial.suggest_float("learning_rate", 0.01, 1.0, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-2, log=True),
        callbacks=[Prune(trial)],
        progress="none",
    )
    if run.reason == "pruned by Optuna":
        raise optuna.TrialPruned
    assert run.best is not None
    return run.best.top1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--runs", default=None, metavar="DIRECTORY", help="of the runs [a new one in /tmp]")
    args = parser.parse_args()
    runs = args.runs or tempfile.mkdtemp(prefix="optuna-runs-")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(lambda trial: trained(trial, args.epochs, runs), n_trials=args.trials)
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{len(study.trials)} trials, {pruned} of them pruned")
    options = ", ".join(f"{name} {value:.3g}" for name, value in study.best_params.items())
    print(f"best: top-1 {100 * study.best_value:.2f} % with {options}")
    print(f"headrace board {runs}")


if __name__ == "__main__":
    main()
