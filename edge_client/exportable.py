"""An agent whose model can leave the device later."""

from edge_client.agent import Agent, _Job
from fedvit.program import Program
from fedvit.wire.messages import Result


class ExportableAgent(Agent):
    """Notes in the vault what each task was made of; `edge_client.trained` reads it."""

    def _work(self, job: _Job, program: Program) -> Result:
        self.vault.note(job.task)
        return super()._work(job, program)
