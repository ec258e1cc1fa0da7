"""What the ranks of a pipeline besides rank 0 do: open, run and close engines when rank 0 does."""

from __future__ import annotations

from flexgen_helm.engine.engine import Engine
from flexgen_helm.engine.pipeline import AnswerRequests, CloseEngine, EndPipeline, OpenEngine, joined_pipeline
from flexgen_helm.errors import FlexgenError


def follow() -> None:
    """Follow rank 0 until it ends. Raises `PipelineError` if a rank is lost, and whatever ends this one."""
    pipeline = joined_pipeline()
    assert pipeline is not None and not pipeline.is_first
    engines: dict[int, Engine] = {}
    try:
        while not isinstance(command := pipeline.receive_command(), EndPipeline):
            try:
                if isinstance(command, OpenEngine):
                    engine = Engine.from_config(command.name_or_path, command.config, name=command.name)
                    engines[engine.number] = engine
                elif isinstance(command, AnswerRequests):
                    engines[command.engine].run(command.requests)
                elif isinstance(command, CloseEngine):
                    engines.pop(command.engine).close()
            except FlexgenError:
                if not pipeline.is_open:
                    raise
                # Rank 0 has raised the same error, and may go on with another engine.
    except BaseException as error:
        pipeline.fail(error)
        raise
    finally:
        for engine in engines.values():
            engine.close()
