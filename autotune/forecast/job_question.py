"""Build the question for the equations from a job's request."""

from autotune.prediction.planning.question import Question
from autotune.session.session import Session
from search_spaces.models.model import ModelSpec


def question_of_session(session: Session) -> Question | None:
    """Return the session's model, cluster and workload as a question, without pins and with the shipped coefficients.

    None: the model is a factory or a script, whose shape is unknown to the equations.
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
