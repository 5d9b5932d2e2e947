"""`create_app`: the OpenAI-compatible server as a plain ASGI app, to be run by any asyncio server or mounted inside another app.

Owns the routes that do not generate; those that do are in `generation.py`. The app starts the engine's thread and never stops it:
that is for whoever made the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmjax.engine.engine_client import EngineClient
from llmjax.errors import LlmjaxError, RequestError
from llmjax.server.config import ServerConfig
from llmjax.server.dashboard_routes import dashboard_routes
from llmjax.server.exchange import read_body
from llmjax.server.generation import Generation
from llmjax.server.http_errors import UNAVAILABLE_RETRY_AFTER, HttpError, error_response
from llmjax.server.middleware import Accounts, ApiKeys
from llmjax.server.openapi import openapi_document
from llmjax.server.prompts import encodable, read_messages
from llmjax.server.protocol import read_template_options
from llmjax.server.service import Service, read_object
from llmjax.server.tool_calls import read_tools
from llmjax.version import __version__

Handler = Callable[[Request], Awaitable[Response]]


def create_app(engine: EngineClient, config: ServerConfig, *, registries: Sequence[CollectorRegistry] = ()) -> Starlette:
    """The app.

    Args:
        engine: several apps may share one.
        config: names, keys, limits.
        registries: further Prometheus registries that `/metrics` shows beside the engine's and the server's own.
    """
    service = Service(engine, config)
    routes = [
        Route("/v1/completions", Generation(service, "completions"), methods=["POST"]),
        Route("/v1/chat/completions", Generation(service, "chat"), methods=["POST"]),
        *_Routes(service, registries).all(),
        *dashboard_routes(service),
    ]
    middleware = [Middleware(Accounts, service=service, routes=[route.path for route in routes])]
    if config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "x-llmjax-warning", "retry-after"],
            )
        )
    if config.api_keys:
        middleware.append(Middleware(ApiKeys, keys=config.api_keys))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(service.close)

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            what = {404: "there is nothing at", 405: f"{request.method} does not work on"}.get(error.status_code, "cannot serve")
            code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
            error = HttpError(error.status_code, f"{what} {request.url.path}", code=code, headers=error.headers)
        service.errors.add(request.scope["state"]["request_id"], error)
        return error_response(error, engine.retry_after())

    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: on_error, LlmjaxError: on_error, Exception: on_error},
    )
    app.router.redirect_slashes = False  # to the client's own Host, and to http also where a proxy has TLS
    app.state.service = service
    return app


class _Routes:
    def __init__(self, service: Service, registries: Sequence[CollectorRegistry]) -> None:
        self._service = service
        self._registries = [service.metrics.registry, *registries]
        self._document = openapi_document(service.config)

    def all(self) -> list[Route]:
        """The routes that do not generate."""
        gets: dict[str, Handler] = {
            "/v1/models": self._models,
            "/v1/models/{id:path}": self._model,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/health": self._readyz,
            "/metrics": self._metrics,
            "/memory": self._memory,
            "/version": self._version,
            "/openapi.json": self._openapi,
        }
        posts: dict[str, Handler] = {"/tokenize": self._tokenize, "/detokenize": self._detokenize, "/abort": self._abort}
        return [
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        ]

    async def _body(self, request: Request, fields: dict[str, Any]) -> dict[str, Any]:
        config = self._service.config
        data = await read_body(request.scope, request.receive, config.max_body_bytes, config.send_timeout)
        body = read_object(data, fields)
        self._service.model(body.pop("model", None))
        return body

    # -- models

    async def _models(self, request: Request) -> Response:
        names = self._service.config.served_names
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._card(self._service.model(request.path_params["id"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "llmjax",
            "max_model_len": self._service.max_context,
        }

    # -- the state of things

    async def _livez(self, request: Request) -> Response:
        health = self._service.engine.health
        return JSONResponse({"status": health.state, "reason": health.reason}, 503 if health.gone else 200)

    async def _readyz(self, request: Request) -> Response:
        health = self._service.engine.health
        headers = None if health.ready else {"retry-after": str(UNAVAILABLE_RETRY_AFTER)}
        return JSONResponse({"status": health.state, "reason": health.reason}, 200 if health.ready else 503, headers)

    async def _metrics(self, request: Request) -> Response:
        text = await self._service.engine.metrics(self._registries)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _memory(self, request: Request) -> Response:
        return JSONResponse(await self._service.engine.memory_map())

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)

    # -- tokens

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(
            request,
            {"model": str, "prompt": str, "messages": list, "add_special_tokens": bool, "add_generation_prompt": bool,
             "chat_template_kwargs": dict, "tools": list, "return_token_strs": bool},
        )  # fmt: skip
        if ("prompt" in body) == ("messages" in body):
            raise RequestError("give either prompt or messages", "prompt")
        tokenizer = self._tokenizer()
        if "messages" in body:
            messages = read_messages(body["messages"])
            options = {**read_template_options(body), "add_generation_prompt": body.get("add_generation_prompt", True)}
            if (tools := read_tools(body)) is not None:
                options["tools"] = list(tools.tools)
            _, ids = await self._service.engine.encode_chat(messages, **options)
        else:
            text, special = encodable(body["prompt"], "prompt"), body.get("add_special_tokens", True)
            ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special)
        answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": self._service.max_context}
        if body.get("return_token_strs", False):
            answer["token_strs"] = await asyncio.to_thread(
                lambda: [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
            )
        return JSONResponse(answer)

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request, {"model": str, "tokens": list})
        ids = body.get("tokens")
        if ids is None:
            raise RequestError("tokens is missing: give a list of token ids", "tokens")
        size = self._tokenizer().vocab_size
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise RequestError(f"tokens[{index}] is {token!a:.40}: token ids are 0 to {size - 1}", "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self._tokenizer().decode, ids, skip_special_tokens=False)})

    def _tokenizer(self) -> Any:
        tokenizer = self._service.engine.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer: it takes and gives token ids only")
        return tokenizer

    # -- control

    async def _abort(self, request: Request) -> Response:
        body = await self._body(request, {"model": str, "request_id": str, "abort_all": bool})
        if "request_id" in body:
            return JSONResponse({"aborted": await self._service.abort(body["request_id"])})
        if body.get("abort_all"):
            return JSONResponse({"aborted": await self._service.engine.abort_group(None)})
        raise RequestError("give request_id (the id of an answer, or the x-request-id sent with it), or abort_all", "request_id")
