"""The ClientApp: carries messages between the ServerApp and the agent of this organisation, and decides nothing."""

import json
import os
import socket

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

SECONDS = 30.0

app = ClientApp()


@app.query("offer")
def offer(message: Message, context: Context) -> Message:
    """Ask the agent whether its organisation has approved the federation file."""
    return ask({"offer": message.content["cgd"]["federation"]}, message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Let the agent join the training; it returns at once."""
    return ask({"join": message.content["cgd"]["federation"]}, message, context)


@app.query()
def report(message: Message, context: Context) -> Message:
    """Return the state of the training, and the metrics that the organisation shows."""
    return ask({"report": True}, message, context)


def ask(request: dict[str, object], message: Message, context: Context) -> Message:
    """Pass a request to the agent, and reply with its answer."""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(SECONDS)
        agent.connect(agent_socket(context))
        agent.sendall(json.dumps(request).encode() + b"\n")
        with agent.makefile("rb") as lines:
            answer = json.loads(lines.readline())
    state = {name: answer[name] for name in ("participant", "state", "reason")}
    content = RecordDict({"cgd": ConfigRecord(state), "metrics": MetricRecord(answer["metrics"])})
    return Message(content, reply_to=message)


def agent_socket(context: Context) -> str:
    """Return the socket of our agent: from this SuperNode's --node-config, or in a simulation from its environment."""
    if "agent" in context.node_config:
        return str(context.node_config["agent"])
    return os.environ["CGD_AGENTS"].split(":")[int(context.node_config["partition-id"])]
