"""A game as a tool: find a number from 0 to 9 in four guesses; the reward is 1 for a game that is won.

    python -m openppo.cli.train_ppo --tools examples/tools/guess.py ...

A row of --prompt_data names the number: {"extra_info": {"tools_kwargs": {"guess": {"create_kwargs": {"secret": 7}}}}}
"""

from typing import Any

from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema

GUESSES = 4


class Guess(BaseTool):
    """Made once; each episode has a game of its own, by the id of its instance."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self.games: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Describe the tool to the model."""
        number = {"type": "integer", "description": "Your guess"}
        parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}
        function = {"name": "guess", "description": "Guess the number.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id: str, secret: int, **kwargs: Any) -> str:
        """Begin a game."""
        self.games[instance_id] = {"secret": secret, "left": GUESSES, "won": False}
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        """Compare a guess with the secret number; guesses beyond the last one, several in a turn say, do not count."""
        game = self.games[instance_id]
        number = int(parameters["number"])
        if game["left"] == 0:
            return "no guess is left"
        game["left"] -= 1
        if number == game["secret"]:
            game["won"] = True
            return "right"
        return "higher" if number < game["secret"] else "lower"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Reward a game that is won."""
        return float(self.games[instance_id]["won"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the game."""
        del self.games[instance_id]
