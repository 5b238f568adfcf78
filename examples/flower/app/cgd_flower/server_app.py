"""The ServerApp: hands out the federation file, waits for the approval of all, and collects what they show."""

import logging
import time
import tomllib
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

log = logging.getLogger("flwr")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Start a training with cgd, and observe it until all participants are done."""
    settings = context.run_config
    text = Path(str(settings["federation"])).read_text()
    content = RecordDict({"cgd": ConfigRecord({"federation": text})})
    nodes = wait_for_nodes(grid, len(tomllib.loads(text)["participants"]), float(settings["wait-seconds"]))
    seconds = float(settings["answer-seconds"])
    states = send(grid, "query.offer", content, nodes, seconds)
    if len(states) < len(nodes):
        raise RuntimeError(f"{len(states)} of {len(nodes)} SuperNodes answer within {seconds:g} seconds")
    if refused := [each for each in states.values() if each["state"] == "refused"]:
        raise RuntimeError("; ".join(f"{each['participant']} refuses: {each['reason']}" for each in refused))
    states |= send(grid, "train", content, nodes, seconds)
    seen: dict[object, str] = {}
    while True:
        answers = send(grid, "query", RecordDict(), nodes, seconds)
        for node in states.keys() - answers.keys():  # the training needs Flower only to start
            log.info("the SuperNode of %s does not answer", states[node]["participant"])
        states |= answers
        for each in states.values():
            if seen.get(each["participant"]) != (line := describe(each)):
                seen[each["participant"]] = line
                log.info("%s", line)
        if failed := [each for each in states.values() if each["state"] == "failed"]:
            raise RuntimeError("; ".join(map(describe, failed)) + "; run this app again when the cause is removed")
        if all(each["state"] == "done" for each in states.values()):
            log.info("all %d participants are done", len(nodes))
            return
        time.sleep(float(settings["report-seconds"]))


def wait_for_nodes(grid: Grid, count: int, seconds: float) -> list[int]:
    """Wait until as many SuperNodes are connected as the file has participants."""
    deadline = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(nodes)} of {count} SuperNodes are connected after {seconds:g} seconds")
        time.sleep(1)
    if len(nodes) > count:
        raise RuntimeError(f"{len(nodes)} SuperNodes are connected, and the file has {count} participants")
    return nodes


def send(grid: Grid, kind: str, content: RecordDict, nodes: list[int], seconds: float) -> dict[int, dict[str, object]]:
    """Send a message to all nodes, and return the states of the participants that answer in time."""
    messages = [Message(content, node, kind, ttl=seconds) for node in nodes]
    states = {}
    for reply in grid.send_and_receive(messages, timeout=seconds):
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise RuntimeError(f"node {node} cannot ask its agent: {reply.error.reason}")
        states[node] = {**reply.content["cgd"], "metrics": dict(reply.content["metrics"])}
    return states


def describe(state: dict[str, object]) -> str:
    """Return a line about a participant."""
    metrics = state["metrics"]
    shown = "".join(f", {name} {value:g}" for name, value in metrics.items()) if isinstance(metrics, dict) else ""
    reason = f": {state['reason']}" if state["reason"] else ""
    return f"{state['participant']} is {state['state']}{shown}{reason}"
