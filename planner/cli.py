"""`moe-lens plan`: the planner on the command line. Modules are loaded by the command that needs
them, so that an estimate answers at once."""

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from planner.errors import InvalidInputError
from planner.inputs import CaseInputs
from planner.options import with_case_options

if TYPE_CHECKING:
    from planner.estimate import Detail

PROGRAM = "moe-lens plan"
_USAGE_STATUS = 2


class _Service(TyperCommand):
    """Stands for `serve` in --help; gRPC is loaded when it is called."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        command = typer.main.get_command(importlib.import_module("planner.service").app)
        command.name = self.name
        return command.make_context(*arguments, **keywords)


class _Plan(TyperGroup):
    """The subcommands. Wrong input of any of them is one line on standard error and status 2."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        text = "Serve the planner over gRPC."
        self.add_command(_Service("serve", callback=lambda: None, help=text))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InvalidInputError as error:
            raise typer.Exit(_complain(str(error))) from error
        except TyperException as error:
            raise typer.Exit(_complain(error.format_message())) from error


app = typer.Typer(
    cls=_Plan,
    help="How fast will a model run on a machine, what limits it, and what would have to change.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


Json = Annotated[bool, typer.Option("--json", help="Print JSON (docs/planner.md).")]
Plot = Annotated[Path | None, typer.Option(help="Write a picture: FILE.png or FILE.svg.")]
NoSimulation = Annotated[bool, typer.Option("--no-simulation", help="Formulas alone.")]
Full = Annotated[bool, typer.Option("--full", help="Simulate every request, however long.")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command on its own."""
    app(arguments, prog_name=PROGRAM)


def _complain(message: str) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return _USAGE_STATUS


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


@app.command()
@with_case_options
def estimate(
    inputs: CaseInputs,
    full: Full = False,
    no_simulation: NoSimulation = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Everything about one case: bounds, batch, simulation, memory."""
    from planner.estimate import estimate_with_steps

    _check_plot(plot)
    found, steps = estimate_with_steps(inputs.case(), _detail(full, no_simulation))
    if plot is not None:
        from planner.pictures import estimate_picture

        estimate_picture(plot, found, steps)
    if as_json:
        _print_json(found.to_json())
    else:
        from planner.tables import print_estimate

        print_estimate(found)


@app.command()
@with_case_options
def size(
    inputs: CaseInputs,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Reach so many prompt and generated tokens per second.")
    ] = None,
    generated_per_s: Annotated[
        float | None, typer.Option(help="Reach so many generated tokens per second.")
    ] = None,
    within: Annotated[str | None, typer.Option(help="Finish all requests in, such as 8h.")] = None,
    by: Annotated[
        str, typer.Option(help="The estimate's figure that counts: steady, stage2 or simulation.")
    ] = "steady",
    no_machines: Annotated[
        bool, typer.Option("--no-machines", help="Leave the catalogue's other machines out.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The least machine that reaches a target, and what each single change would gain."""
    from planner import sizing
    from planner.units import parse_seconds

    within_s = None if within is None else parse_seconds(within, "within")
    target = sizing.Target(tokens_per_s, generated_per_s, within_s)
    problem = sizing.Problem.of(inputs, target, by)
    found = sizing.size(problem, machines=not no_machines)
    if as_json:
        _print_json(found.to_json())
    else:
        from planner.answers import print_size

        print_size(found)


@app.command()
@with_case_options
def sweep(
    inputs: CaseInputs,
    over: Annotated[
        list[str], typer.Option(help="An input's values: prompt=64,128 or kv=50..800GB*2.")
    ],
    simulate: Annotated[bool, typer.Option("--simulate", help="Run the simulation too.")] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write the CSV there instead of printing it.")
    ] = None,
    plot: Plot = None,
    picture: Annotated[
        str | None, typer.Option(help="heatmap, roofline or pareto (by the axes).")
    ] = None,
) -> None:
    """A case over ranges of its inputs: CSV, and a picture."""
    from planner.estimate import Detail
    from planner.sweep import parse_axis
    from planner.sweep import sweep as run

    _check_plot(plot)
    axes = [parse_axis(text) for text in over]
    result = run(inputs, axes, Detail.SCALED if simulate else Detail.NONE)
    if plot is not None:
        from planner.pictures import sweep_picture

        sweep_picture(plot, result, picture, f"{inputs.model} on {inputs.hardware}")
    if csv is not None:
        _write(csv, result.to_csv())
    elif plot is None:
        print(result.to_csv(), end="")


@app.command()
@with_case_options
def compare(inputs: CaseInputs, as_json: Json = False) -> None:
    """This system beside MoE-Lightning and FlexGen on the same machine."""
    from planner.compare import compare as run
    from planner.compare import to_json

    rows = run(inputs.case())
    if as_json:
        _print_json(to_json(rows))
    else:
        from planner.answers import print_comparison

        print_comparison(rows)


@app.command()
def published(as_json: Json = False) -> None:
    """The baselines' models beside what was measured and published, row by row."""
    from planner.published import published_rows, rows_to_json

    rows = list(published_rows())
    if as_json:
        _print_json(rows_to_json(rows))
    else:
        from planner.answers import print_published

        print_published(rows)


@app.command()
@with_case_options
def explain(
    inputs: CaseInputs,
    figure: Annotated[
        str | None, typer.Option(help="One figure, such as stage2.tokens_per_s.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The formula of every figure of an estimate, with the numbers put in."""
    from planner.estimate import estimate as run
    from planner.explain import explain as all_of
    from planner.explain import to_json

    case = inputs.case()
    rows = all_of(case, run(case), figure)
    if as_json:
        _print_json(to_json(rows))
    else:
        from planner.answers import print_explanations

        print_explanations(rows)


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(help="One of them, or a checkpoint's folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The catalogue's models: parameters, bytes, KV."""
    from planner.lists import model_entries

    entries = model_entries(name)
    if as_json:
        _print_json({"schema": "moe-lens/model-list/1", "models": entries})
    else:
        from planner.listings import print_models

        print_models(entries)


@app.command()
def hardware(
    name: Annotated[str | None, typer.Argument(help="One of them, GPU+HOST, or a file.")] = None,
    as_json: Json = False,
) -> None:
    """The catalogue's machines, or one with every value and where it is from."""
    from planner.lists import machine_list, one_machine

    if name is not None:
        machine = one_machine(name)
        if as_json:
            _print_json(machine.to_json())
        else:
            from planner.listings import print_machine

            print_machine(machine)
        return
    listed = machine_list()
    if as_json:
        _print_json(listed)
    else:
        from planner.listings import print_machines

        print_machines(listed)


def _detail(full: bool, none: bool) -> "Detail":
    from planner.estimate import Detail

    if full and none:
        raise InvalidInputError("full", "contradicts --no-simulation")
    return Detail.NONE if none else Detail.FULL if full else Detail.SCALED


def _check_plot(path: Path | None) -> None:
    if path is not None:
        from planner.plots import check_path

        check_path(path)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InvalidInputError("csv", f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    main()
