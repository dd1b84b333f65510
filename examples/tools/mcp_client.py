"""Tools of an MCP server that talks over stdin and stdout (pip install mcp).

    python -m openppo.cli.train_ppo --tools examples/tools/mcp.yaml ...

Each entry of the YAML file is one tool: ``command`` starts the server, ``tool`` is the tool's name there. Its schema is
asked of the server when training starts. One server serves all episodes of a rank; it begins with the first.
"""

import asyncio
from typing import Any

from mcp import ClientSession, StdioServerParameters, stdio_client

from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from openppo.process_groups import bound


class MCPTool(BaseTool):
    """One tool of a server; ``config`` has ``command``, a list, and ``tool``, its name there."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        if not isinstance(config.get("command"), list) or "tool" not in config:
            raise ValueError(
                "an MCP tool needs 'command', a list that starts a server which talks over stdin and stdout, and "
                "'tool', the name there. For a server over HTTP let command start a bridge, such as mcp-proxy."
            )
        self.program = config["command"][0]
        command, *arguments = bound(
            *config["command"]
        )  # a server that does not read on ends with this process too
        self.server = StdioServerParameters(command=command, args=arguments, env=config.get("env"))
        self.tool = config["tool"]
        self.connection: asyncio.Future[ClientSession] | None = None
        super().__init__(config, tool_schema)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return getattr(self, "tool_schema", None) or asyncio.run(self._ask_schema())

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str | None:
        await self._session()
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResponse:
        result = (await (await self._session()).call_tool(self.tool, parameters)).model_dump(
            by_alias=True
        )
        text = "\n".join(part["text"] for part in result["content"] if part["type"] == "text")
        return ToolResponse(text=f"Error: {text}" if result.get("isError") else text)

    async def _session(self) -> ClientSession:
        """The connection, which a task of its own opens, as what it holds must be left by the task that entered it."""
        if self.connection is None:
            self.connection = asyncio.get_running_loop().create_future()
            self.serving = asyncio.create_task(self._serve(self.connection))
            self.serving.add_done_callback(self._ended)
        return await asyncio.shield(self.connection)

    async def _serve(self, connection: "asyncio.Future[ClientSession]") -> None:
        async with stdio_client(self.server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            connection.set_result(session)
            await asyncio.Event().wait()

    def _ended(self, serving: "asyncio.Task[None]") -> None:
        """Hand on what went wrong; the next episode connects again."""
        connection, self.connection = self.connection, None
        if connection is not None and not connection.done():
            connection.set_exception(
                RuntimeError(f"the MCP server {self.program} could not be started")
            )

    async def _ask_schema(self) -> OpenAIFunctionToolSchema:
        try:
            async with stdio_client(self.server) as streams, ClientSession(*streams) as session:
                await session.initialize()
                found = {
                    each.name: each.model_dump(by_alias=True)
                    for each in (await session.list_tools()).tools
                }
        except Exception as error:  # groups of groups
            raise ValueError(
                f"the MCP server {self.program} does not answer; see its output."
            ) from error
        if self.tool not in found:
            raise ValueError(
                f"the MCP server has no tool {self.tool!r}; it has: {', '.join(found) or 'none'}."
            )
        it = found[self.tool]
        function = {
            "name": it["name"],
            "description": it["description"] or "",
            "parameters": it["inputSchema"],
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
