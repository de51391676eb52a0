"""Build the question for the equations from a job's request."""

from autotune.prediction.cases.module_cases import predictable
from autotune.prediction.planning.question import Question
from autotune.session.session import Session
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model


def question_of_session(session: Session) -> Question | None:
    """Return the session's model, cluster and workload as a question, without pins and with the shipped coefficients.

    None: the model is a script, or a module without a profile: unknown to the equations.
    """
    model = predictable(session.model, session.space)
    if model is None:
        return None
    request = session.request
    return Question(
        model=model, cluster=session.cluster, engine=request.engine, global_batch_size=request.global_batch_size,
        sequence_length=request.sequence_length, space=request.space, simple=request.simple, nvme_path=request.nvme_path,
        training_steps=request.training_steps,
        document_lengths=request.document_lengths,
    )  # fmt: skip


def unknown_model(model: Model) -> str:
    """Why `question_of_session` has no question for a model, in a clause."""
    if isinstance(model, CommandModel):
        return "the model is a script, whose shape the equations do not know"
    reason = (isinstance(model, FactoryModel) and model.no_profile) or "it has no profile in every precision of the space"
    return f"the equations do not know the module ({reason})"
