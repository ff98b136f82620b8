"""A real SGLang server lets nobody in without its key: every route, every way around, and the port beside it."""

import httpx
import psutil
import pytest

from tests.support.sglang import RunningEngine

pytestmark = pytest.mark.integration

GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture
def http(sglang_server: RunningEngine) -> httpx.Client:
    return httpx.Client(base_url=sglang_server.url, timeout=20)


def with_key(engine: RunningEngine) -> dict[str, str]:
    return {"authorization": f"Bearer {engine.server.api_key}"}


def test_every_route_refuses_a_request_without_the_key(sglang_server: RunningEngine, http: httpx.Client) -> None:
    paths = http.get("/openapi.json", headers=with_key(sglang_server)).json()["paths"]
    routes = [(method, path.replace("{", "").replace("}", "")) for path, item in paths.items() for method in item]
    assert len(routes) > 100 and ("post", "/generate") in routes
    routes += [("get", path) for path in ("/docs", "/openapi.json", "/metrics", "/metrics/", "/v1/realtime", "/none")]
    routes += [("options", "/generate"), ("head", "/health"), ("trace", "/generate")]
    answers = {(method, path): http.request(method, path).status_code for method, path in routes}
    assert {route: status for route, status in answers.items() if status != 401} == {}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer wrong"},
        {"authorization": ""},
        {"x-api-key": "KEY"},
        {"host": "x/health?"},  # SGLang's own check reads the path from a URL that is built with this header
        {"x-forwarded-prefix": "/health", "x-original-url": "/health"},
    ],
)
def test_ways_around_the_key_are_refused(
    sglang_server: RunningEngine, http: httpx.Client, headers: dict[str, str]
) -> None:
    headers = {name: value.replace("KEY", sglang_server.server.api_key) for name, value in headers.items()}
    assert http.post("/generate", json=GENERATE, headers=headers).status_code == 401
    assert http.post(f"/generate?api_key={sglang_server.server.api_key}", json=GENERATE).status_code == 401
    assert http.post("/generate", json=GENERATE, headers=with_key(sglang_server)).status_code == 200


def test_weight_addresses_are_told_and_taken_with_the_key_only(sglang_server: RunningEngine) -> None:
    server = sglang_server.server
    assert server.remote_weights, "this test needs Mooncake"
    with httpx.Client(base_url=f"http://127.0.0.1:{server._memory_port}", timeout=20) as memory:
        forged = {"tp_rank": 0, "transfer_engine_info": {"session_id": "127.0.0.1:1", "weights_info_dict": {}}}
        before = memory.get("/get_transfer_engine_info?rank=0", headers=with_key(sglang_server))
        assert before.status_code == 200
        assert memory.get("/get_transfer_engine_info?rank=0").status_code == 401
        assert memory.put("/register_transfer_engine_info", json=forged).status_code == 401
        assert memory.get("/get_transfer_engine_info?rank=0", headers=with_key(sglang_server)).json() == before.json()


def test_key_is_in_no_command_line_and_no_log(sglang_server: RunningEngine) -> None:
    server = sglang_server.server
    guard = psutil.Process(server.pid)
    lines = [" ".join(process.cmdline()) for process in [guard, *guard.children(recursive=True)]]
    assert any("serve.py" in line for line in lines)
    assert server.api_key not in "\n".join(lines)
    log = server.log_path.read_text()
    assert "'api_key': '***'" in log and server.api_key not in log
