"""The objective of Stage I: the routes and views of each step, its losses and the moving average."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dsnet.core.distributed.ranks import Ranks
from dsnet.core.seeding import reseed, seeded
from dsnet.errors import DsnetError
from dsnet.models import Supernet, initialise
from dsnet.models.conv_blocks import ConvNormAct
from dsnet.routes import Route
from dsnet.slicing import Mode
from dsnet.training.classifier_task import Objective
from dsnet.training.config import TrainConfig
from dsnet.training.optim import parameter_groups
from dsnet.training.stage1._compiled import compiled, enough_programs
from dsnet.training.stage1._graphed_step import GraphedStep
from dsnet.training.stage1.ema import TEACHER, Average
from dsnet.training.stage1.projector import Projector
from dsnet.training.stage1.scheme import Scheme, single_route
from dsnet.training.stage1.step import Passes, Stage1, StepLosses
from dsnet.training.stage1.teacher import Teacher
from dsnet.training.stage1.views import Views
from dsnet.training.sync_batch_norm import SharedStatistics

SMALL = 64  # pixels: up to here launching kernels takes longer than running them

__all__ = ["Stage1Objective", "initialise_alone"]


class Stage1Objective(Objective):
    """Trains the networks of a scheme's steps.

    Args:
        config: Settings of the run.
        model: The network, on its device.
        views: Makes the views of each step.
        steps: Steps of the run.
        ranks: Processes that train together.
        teacher: External teacher, if the scheme has one.

    Raises:
        DsnetError: ``scheme.drop_path`` is set for a network without residual branches.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Supernet,
        views: Views,
        *,
        steps: int,
        ranks: Ranks,
        teacher: Teacher | None = None,
    ) -> None:
        self.config, self.model, self.views, self.ranks = config, model, views, ranks
        self.steps, self.classes = steps, model.head.classifier.out_features
        scheme, run = config.scheme, config.run
        self.space = model.space if scheme.route is None else model.space.narrow([scheme.route])
        if scheme.drop_path and not any(hasattr(module, "share") for module in model.modules()):
            raise DsnetError(f"scheme.drop_path: {model.spec.name} has no residual branches to leave out")
        self.scheme = scheme.parse() if scheme.route is None else Scheme(draw=single_route)
        self.views_per_step = self.scheme.views(self.scheme.networks(self.space, scheme.random))
        device = model.head.classifier.weight.device
        self.noise = torch.Generator(device)  # of stochastic depth and dropout
        self.shares_statistics = ranks.world > 1 and run.sync_norms
        mode, largest_mode = self._modes()
        self.average: Average | None = None
        if config.average:
            shared = Mode(statistics=SharedStatistics(update=False)) if self.shares_statistics else TEACHER
            self.average = Average(model, scheme.alpha, warmup=scheme.alpha_warmup, mode=shared)
        self.projector: Projector | None = None
        if self.scheme.hierarchical:
            self.projector = Projector.of(model, scheme.stages).cpu()
            initialise(self.projector, seeded(run.seed, "projector"))
            self.projector.to(device)
        self.stage = Stage1(
            scheme=self.scheme,
            average=self.average if self.scheme.uses_average else None,
            projector=self.projector,
            teacher=teacher,
            smoothing=scheme.smoothing,
            temperature=scheme.temperature,
            add=scheme.add,
            mode=mode,
            largest_mode=largest_mode,
            autocast=torch.bfloat16 if run.precision == "bfloat16" else None,
        )
        if self._uses_graphs(device):
            self.passes: Passes = GraphedStep(self.stage, model)
        else:
            self.passes = Passes(self.stage, compiled(model) if run.compile else model)

    def _uses_graphs(self, device: torch.device) -> bool:
        """By default where the GPU would wait for the host: small images, nothing to communicate."""
        run = self.config.run
        if run.graphs is not None:
            return run.graphs
        size = self.config.data.size or self.model.input_spec.image_size
        small = device.type == "cuda" and size <= SMALL
        return small and not self.shares_statistics and not run.compile

    def _modes(self) -> tuple[Mode | None, Mode | None]:
        """Return the mode of the networks, and that of the largest one."""
        scheme = self.config.scheme
        statistics = SharedStatistics(update=True) if self.shares_statistics else None
        keep = scheme.keep_statistics
        plain = Mode(statistics=statistics, keep_calibrated=keep) if statistics or keep else None
        if not scheme.drop_path and not scheme.dropout:
            return plain, plain
        drops = Mode(
            statistics=statistics,
            keep_calibrated=keep,
            drop_path=scheme.drop_path,
            dropout=scheme.dropout,
            generator=self.noise,
        )
        return drops if self.model.drops_everywhere else plain, drops

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return the parameters of the network without its routing heads, and of the projector."""
        modules = [self.model] if self.projector is None else [self.model, self.projector]
        return parameter_groups(modules, weight_decay)

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Run forward and backward of a step's networks; return its losses by name."""
        seed = self.config.run.seed
        routes = self.scheme.draw(self.space, self.config.scheme.random, seeded(seed, "routes", step))
        reseed(self.noise, seed, "noise", self.ranks.rank, step)
        views, targets = self.views(
            images, labels, count=self.scheme.views(len(routes)), step=step, classes=self.classes
        )
        labels_only = step < self.config.scheme.start * self.steps
        with enough_programs(self.model) if self.config.run.compile else nullcontext():
            losses = self.passes.step(routes, views, targets, labels_only=labels_only)
        return _named(losses)

    def end_step(self) -> None:
        """Update the average."""
        if self.average is not None:
            self.average.update(self.model)

    @torch.no_grad()
    def finish(self) -> None:
        """Keep the average instead of the weights if the run says so."""
        if self.config.run.keep == "average" and self.average is not None:
            for weight, average in zip(self.model.parameters(), self.average.model.parameters(), strict=True):
                weight.copy_(average)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the average and the projector."""
        groups: dict[str, dict[str, Tensor]] = {}
        if self.average is not None:
            groups["average"] = {name: p.detach() for name, p in self.average.model.named_parameters()}
        if self.projector is not None:
            groups["projector"] = dict(self.projector.state_dict())
        return groups

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Load what `tensors` returned, after ``step`` steps."""
        if self.average is not None:
            for name, parameter in self.average.model.named_parameters():
                parameter.copy_(tensors["average"][name])
            self.average.steps = step
        if self.projector is not None:
            self.projector.load_state_dict(dict(tensors["projector"]))


def _named(losses: StepLosses) -> dict[str, Tensor]:
    """Return losses by role and term; for the random networks their means."""
    named: dict[str, list[Tensor]] = {}
    last = len(losses.networks) - 1
    for position, network in enumerate(losses.networks):
        role = {0: "largest", last: "smallest"}.get(position, "random") if last else "route"
        for term, value in network.terms:
            named.setdefault(f"{role}/{term}", []).append(value)
    return {name: torch.stack(values).mean() for name, values in named.items()} | {"loss": losses.total}


def initialise_alone(model: Supernet, route: Route) -> None:
    """Rescale the initial weights of a supernet to those of a stand-alone network of this route."""
    network, route = model.at(route)
    for gates in range(1, len(route.choices) + 1):
        for block, size, _ in network.chain(route.choices[:gates]):
            for layer in block.modules():
                if isinstance(layer, ConvNormAct):
                    layer.rescale(size)
