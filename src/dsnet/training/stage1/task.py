"""Stage I as something the loop can train: draws of a step, views, the sandwich, the moving average."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsnet.core.distributed.ranks import Ranks
from dsnet.core.seeding import reseed, seeded
from dsnet.errors import DsnetError
from dsnet.models import Supernet, initialise
from dsnet.models.conv_blocks import ConvNormAct
from dsnet.routes import Route
from dsnet.slicing import Mode, batch_statistics
from dsnet.training.classifier_task import Objective
from dsnet.training.config import SchemeConfig, TrainConfig
from dsnet.training.optim import parameter_groups
from dsnet.training.stage1.compiled import compiled, enough_programs
from dsnet.training.stage1.ema import Average
from dsnet.training.stage1.graphed_step import GraphedStep
from dsnet.training.stage1.projector import Projector
from dsnet.training.stage1.scheme import Scheme, single_route
from dsnet.training.stage1.step import Stage1, StepLosses
from dsnet.training.stage1.teacher import Teacher
from dsnet.training.stage1.views import Views
from dsnet.training.sync_batch_norm import SharedStatistics

SMALL = 64  # pixels: up to here launching kernels takes longer than running them

__all__ = ["Stage1Objective", "initialise_alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modes:
    largest: Mode | None
    others: Mode | None
    teacher: Mode


class Stage1Objective(Objective):
    """What the loop trains in Stage I."""

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
        route = config.scheme.route
        self.space = model.space if route is None else model.space.narrow([route])
        if config.scheme.drop_path and not any(hasattr(module, "share") for module in model.modules()):
            raise DsnetError(f"scheme.drop_path: {model.spec.name} has no residual branches to leave out")
        self.scheme = _scheme(config.scheme)
        self.views_per_step = self.scheme.views(self.scheme.networks(self.space, config.scheme.random))
        device = model.head.classifier.weight.device
        self.noise = torch.Generator(device)  # of stochastic depth and dropout
        modes = self._modes()
        self.average = (
            Average(model, config.scheme.alpha, warmup=config.scheme.alpha_warmup, mode=modes.teacher)
            if config.average
            else None
        )
        self.projector: Projector | None = None
        if self.scheme.hierarchical:
            self.projector = Projector.of(model, config.scheme.stages).cpu()
            initialise(self.projector, seeded(config.run.seed, "projector"))
            self.projector.to(device)
        self.stage = Stage1(
            scheme=self.scheme,
            average=self.average if self.scheme.uses_average else None,
            projector=self.projector,
            teacher=teacher,
            smoothing=config.scheme.smoothing,
            temperature=config.scheme.temperature,
            add=config.scheme.add,
            mode=modes.others,
            largest_mode=modes.largest,
            autocast=torch.bfloat16 if config.run.precision == "bfloat16" else None,
        )
        self.network = compiled(model) if config.run.compile else model
        self.stepper = GraphedStep(self.stage, model) if self._wants_graphs(device) else self.stage

    def _wants_graphs(self, device: torch.device) -> bool:
        """As told; else where the GPU would wait for the host: small images, nothing to communicate."""
        run = self.config.run
        if run.graphs is not None:
            return run.graphs
        size = self.config.data.size or self.model.input_spec.image_size
        shared = self.ranks.world > 1 and run.sync_norms
        return device.type == "cuda" and size <= SMALL and not shared and not run.compile

    def _modes(self) -> _Modes:
        scheme, shared = self.config.scheme, self.ranks.world > 1 and self.config.run.sync_norms
        statistics = SharedStatistics(update=True) if shared else None
        plain = None if statistics is None else Mode(statistics=statistics)
        dropping = plain
        if scheme.drop_path or scheme.dropout:
            dropping = Mode(
                statistics=statistics,
                drop_path=scheme.drop_path,
                dropout=scheme.dropout,
                generator=self.noise,
            )
        teacher = Mode(statistics=SharedStatistics(update=False) if shared else batch_statistics)
        return _Modes(
            largest=dropping, others=dropping if self.model.drops_everywhere else plain, teacher=teacher
        )

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """What is optimised: the network without its routing heads, and the projector."""
        modules = [self.model] if self.projector is None else [self.model, self.projector]
        return parameter_groups(modules, weight_decay)

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Forward and backward of a step's networks; its losses by name."""
        seed = self.config.run.seed
        routes = self.scheme.draw(self.space, self.config.scheme.random, seeded(seed, "routes", step))
        reseed(self.noise, seed, "noise", self.ranks.rank, step)
        views, targets = self.views(
            images, labels, count=self.scheme.views(len(routes)), step=step, classes=self.classes
        )
        labels_only = step < self.config.scheme.start * self.steps
        with enough_programs(self.model) if self.config.run.compile else nullcontext():
            losses = self.stepper.step(self.network, routes, views, targets, labels_only=labels_only)
        return _named(losses)

    def end_step(self) -> None:
        """After the optimiser: the average takes the weights in."""
        if self.average is not None:
            self.average.update(self.model)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What must be saved beside the network and the optimiser."""
        groups: dict[str, dict[str, Tensor]] = {}
        if self.average is not None:
            groups["average"] = {name: p.detach() for name, p in self.average.model.named_parameters()}
        if self.projector is not None:
            groups["projector"] = dict(self.projector.state_dict())
        return groups

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Takes up what `tensors` gave, after ``step`` steps."""
        if self.average is not None:
            for name, parameter in self.average.model.named_parameters():
                parameter.copy_(tensors["average"][name])
            self.average.steps = step
        if self.projector is not None:
            self.projector.load_state_dict(dict(tensors["projector"]))


def _scheme(config: SchemeConfig) -> Scheme:
    return config.parse() if config.route is None else Scheme(draw=single_route)


def _named(losses: StepLosses) -> dict[str, Tensor]:
    """Losses by role and term; those of the random networks as their mean."""
    named: dict[str, list[Tensor]] = {}
    last = len(losses.networks) - 1
    for position, network in enumerate(losses.networks):
        role = {0: "largest", last: "smallest"}.get(position, "random") if last else "route"
        for term, value in network.terms:
            named.setdefault(f"{role}/{term}", []).append(value)
    return {name: torch.stack(values).mean() for name, values in named.items()} | {"loss": losses.total}


def initialise_alone(model: Supernet, route: Route) -> None:
    """Makes weights just drawn for the supernet those of a stand-alone network of this route."""
    for gates in range(1, len(route.choices) + 1):
        for block, size, _ in model.chain(route.choices[:gates]):
            for layer in block.modules():
                if isinstance(layer, ConvNormAct):
                    layer.rescale(size)
