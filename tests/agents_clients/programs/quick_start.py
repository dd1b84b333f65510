"""Run code of a package's own description, with another name of the model: PACKAGE MARK... ("*": of ChatOpenAI)."""

import re
import sys
import textwrap
from importlib.metadata import metadata

package, *marks = sys.argv[1:]
described = metadata(package)
text = str(described.get_payload() or described["Description"])
if package == "langchain-openai":
    from langchain_openai import ChatOpenAI

    text = textwrap.dedent(ChatOpenAI.__doc__ or "")
blocks = [
    textwrap.dedent(block) for block in re.findall(r"```py\w*\n(.*?)```", text, flags=re.DOTALL)
]
names: dict = {"__name__": "__main__"}
for mark in marks:
    block = next(block for block in blocks if mark in block)
    block = re.sub(r"\b(model(?:_id)?)=\"[^\"]*\"", r'\1="policy"', block)
    block = block.replace("InferenceClientModel()", 'OpenAIModel("policy")').replace(
        "InferenceClientModel", "OpenAIModel"
    )
    exec(compile(block, f"{package}: {mark}", "exec"), names)
