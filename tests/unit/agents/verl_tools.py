"""Classes in verl's old form and its new one, with nothing but their imports changed; they keep a journal."""

import json
from typing import Any
from uuid import uuid4

from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, rollout_trace_op

JOURNAL: list[tuple[Any, ...]] = []
SCHEMA = {
    "type": "function",
    "function": {
        "name": "grade",
        "description": "Grades an answer.",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "description": "The answer", "minLength": 1}
            },
            "required": ["answer"],
        },
        "strict": False,
    },
}


class OldGrader(BaseTool):
    """An id, texts, parameters as JSON text."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs
    ) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {
            "response": "",
            "ground_truth": ground_truth,
            "reward": 0.0,
        }
        JOURNAL.append(("create", ground_truth))
        return instance_id

    async def execute(self, instance_id: str, parameters: str, **kwargs) -> tuple[str, float, dict]:
        answer = json.loads(parameters).get("answer", "")
        JOURNAL.append(("execute", answer, kwargs))
        entry = self._instance_dict[instance_id]
        entry["response"] = answer
        reward = await self.calc_reward(instance_id)
        step = 0.0 if reward > entry["reward"] else -0.05
        entry["reward"] = reward
        return f"parsed {answer}, reward {reward}", step, {"tries": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        JOURNAL.append(("calc_reward", kwargs))
        entry = self._instance_dict[instance_id]
        return float(entry["response"] == entry["ground_truth"])

    async def release(self, instance_id: str, **kwargs) -> None:
        JOURNAL.append(("release", kwargs))
        del self._instance_dict[instance_id]


class NewGrader(OldGrader):
    """The id and a response, parameters as a dict, the row's arguments as one dict."""

    async def create(self, instance_id: str | None = None, **kwargs) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._instance_dict[instance_id] = {
            "response": "",
            "ground_truth": ground_truth,
            "reward": 0.0,
        }
        JOURNAL.append(("create", ground_truth))
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[ToolResponse, float, dict]:
        said, reward, metrics = await super().execute(instance_id, json.dumps(parameters), **kwargs)
        return ToolResponse(text=said), reward, metrics
