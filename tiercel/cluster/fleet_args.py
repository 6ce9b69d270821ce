"""The arguments of the application, from `serve run` or the `args` of a config file."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FleetArgs(BaseModel):
    """The arguments of the application. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = Field(min_length=1, description="folder of the model, on all nodes")
    secret_file: str = Field(min_length=1, description="the file of --engine-secret-file, on all nodes")
    several_machines: bool = Field(default=False, description="listen at the node's address; needs certificates")
    fronts: int = Field(default=1, ge=1, le=64)
    front_port: int = Field(default=8000, ge=1, le=65_535)
    front_host: Literal["127.0.0.1", "::1", "0.0.0.0", "::"] = "127.0.0.1"  # noqa: S104 - chosen by the operator
    front_flags: list[str] = Field(default=[], description="further flags of `tiercel serve`")
    front_cpus: float = Field(default=1.0, ge=0)
    least_engines: int = Field(default=1, ge=1, le=64)
    most_engines: int = Field(default=1, ge=1, le=64)
    engine_flags: list[str] = Field(default=[], description="further flags of `tiercel engine`")
    engine_cpus: float = Field(default=1.0, ge=0)
    engine_gpus: float = Field(default=0.0, ge=0)
    goal_s: float = Field(default=2.0, gt=0, description="seconds of predicted work per engine")
    calm_s: float = Field(default=60.0, ge=0, description="seconds of less work before an engine is stopped")
    drain_s: float = Field(default=30.0, ge=0, description="seconds for what runs when a process is stopped")

    @model_validator(mode="after")
    def _check(self) -> "FleetArgs":
        if self.least_engines > self.most_engines:
            raise ValueError(f"least_engines is {self.least_engines}, more than most_engines, {self.most_engines}")
        return self
