"""What a client can ask beside generation: models, tokens, health, version, metrics.

Does not know: how anything is generated.
"""

from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

import kvcore
from model.serve.answers import Detokenized, HealthReport, ModelCard, ModelList, Tokenized, Version
from model.serve.errors import ApiError
from model.serve.large_bodies import LargeBodyRoute
from model.serve.logprobs import quoted
from model.serve.metrics import Metrics
from model.serve.protocol import DetokenizeRequest, TokenizeRequest
from model.serve.service import Service
from model.turns import in_turn


def about(service: Service) -> APIRouter:
    """The routes that tell of models and tokens. O(1)."""
    router = APIRouter(route_class=LargeBodyRoute)

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=service.created,
            max_model_len=service.serving().max_model_len,
        )

    @router.get("/v1/models")
    async def models() -> ModelList:
        """List the models: one, by each of its names, and its LoRA adapters."""
        return ModelList(data=[card(name) for name in service.names])

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """That model."""
        service.check_model(model)
        return card(model)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        """The tokens of a prompt, or of messages."""
        service.check_model(body.model)
        limit = service.serving().max_model_len
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: wanted this or messages", param="prompt")
        if body.prompt is not None:
            tokens = await service.encode(body.prompt)
        else:
            tokens = await service.encode_chat(body.messages or [], body)
        return Tokenized(count=len(tokens), max_model_len=limit, tokens=tokens)

    @router.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens, sent as it is made."""
        service.check_model(body.model)
        service.serving()
        await in_turn(partial(service.checked, body.tokens))

        async def answer() -> AsyncIterator[str]:
            yield '{"prompt":"'
            async for piece in service.decoded(body.tokens):
                yield quoted(piece)[1:-1]
            yield '"}'

        return StreamingResponse(answer(), media_type="application/json")

    return router


def status(service: Service, metrics: Metrics) -> APIRouter:
    """The routes that tell how it goes. O(1)."""
    router = APIRouter()

    @router.get("/health", responses={503: {"model": HealthReport}})
    async def health(response: Response) -> HealthReport:
        """Whether requests are taken: 200, else 503."""
        found = service.engine.health
        response.status_code = 200 if found.is_ready else 503
        return HealthReport(
            status=found.state.value, num_faults=found.num_faults, last_fault=found.last_fault
        )

    @router.get("/version")
    async def version() -> Version:
        """Which kvcore this is."""
        return Version(version=kvcore.__version__)

    @router.get("/metrics", response_class=Response)
    async def scrape() -> Response:
        """What Prometheus reads."""
        content, media_type = metrics.page()
        return Response(content, headers={"Content-Type": media_type})

    return router
