"""The program of participants that are jobs of several ranks, and of ordinary ones with the same records."""

TRAINING = """
import hashlib, os, sys, time
import torch
import torch.distributed as dist
import cgd

torch.set_num_threads(1)
SHARES = {"ada": (16, 10), "bob": (13, 13), "cleo": (16, 10)}  # bob's ranks use DistributedDataParallel


def shards(name):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    x = torch.randn(26, 6, generator=generator)
    return list(zip(x.split(SHARES[name]), (x.sum(1) > 0).long().split(SHARES[name])))


def gradients(model, x, y):
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    return [each.grad for each in model.parameters()]


def train(peers, steps, pause=0.0):
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    own = shards(peers.me)
    samples = 26 if alone else SHARES[peers.me][rank]
    with cgd.public_seed(4):
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    cgd.confine(model, delta=0.1, seed=peers.seed)
    if peers.me == "bob" and not alone:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=samples, momentum=0.5)
    count = torch.tensor([float(len(x)) for x, _ in (own if alone else own[rank : rank + 1])])
    losses = [float(peers.sum(count.sum(0, keepdim=True), bound=1000.0)[0])]
    for step in optimizer.steps(steps):
        time.sleep(pause)
        if alone:  # the same arithmetic in one process: the mean of two micro-batches, by their numbers of records
            first, second = ([each.clone() for each in gradients(model, x, y)] for x, y in own)
            for parameter, *both in zip(model.parameters(), first, second):
                weighted = [each.double() * (n / samples) for each, n in zip(both, SHARES[peers.me])]
                parameter.grad = (weighted[0] + weighted[1]).float()
        else:
            gradients(model, *own[rank])
            with open(f"{peers.me}.{rank}.pid", "w") as file:
                file.write(f"{os.getpid()}")
            if rank == 0:
                with open(f"{peers.me}.step", "w") as file:
                    file.write(str(step))
        optimizer.step()
    return optimizer.displacement(), losses


def main(peers):
    displacement, losses = train(peers, peers.training["steps"], float(os.environ.get("PAUSE", "0")))
    assert losses == [len(peers) * 26], losses
    rank = dist.get_rank()
    with open(f"{peers.me}.bits" if rank == 0 else f"{peers.me}.{rank}.bits", "w") as file:
        file.write(hashlib.sha256(displacement.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    dist.init_process_group()
    with cgd.join("federation.toml", participant=sys.argv[1]) as peers:
        main(peers)
    dist.destroy_process_group()
"""
