"""What the equations are asked of a job, as far as its request says it."""

from autotune.prediction.planning.question import Question
from autotune.session.session import Session
from search_spaces.model import ModelSpec


def question_of_session(session: Session) -> Question | None:
    """Its model, cluster and workload, without pins and by the shipped coefficients.

    None: the model is a factory or a script, of whose shape the equations know nothing.
    """
    if not isinstance(session.model, ModelSpec):
        return None
    request = session.request
    return Question(
        model=session.model, cluster=session.cluster, engine=request.engine, global_batch_size=request.global_batch_size,
        sequence_length=request.sequence_length, space=request.space, simple=request.simple, nvme_path=request.nvme_path,
        training_steps=request.training_steps,
        document_lengths=request.document_lengths,
    )  # fmt: skip
