"""The role table: every built-in harness as it shows itself on the wire, and tables from configuration."""

import pytest

from gyre_core.trajectory.roles import BUILTIN_TABLES, Matcher, RequestFacts, RoleTable, find_table, role_table
from gyre_core.types import Role

CASES: list[tuple[str, str, RequestFacts, Role]] = [
    ("quickstart-agent", "1", RequestFacts(headers={}, last_user=("do it",)), Role.MAIN),
    ("quickstart-agent", "1", RequestFacts(headers={"x-agent-parent": "main"}), Role.SUB_AGENT),
    ("quickstart-agent", "1", RequestFacts(headers={"x-agent-parent": ""}), Role.MAIN),
    ("quickstart-agent", "1", RequestFacts(headers={}, last_user=(" Write a summary now",)), Role.MAIN_SUMMARY),
    (
        "quickstart-agent",
        "1",
        RequestFacts(headers={"x-agent-parent": "m"}, last_user=("Write a summary",)),
        Role.SUB_AGENT_SUMMARY,
    ),
    ("quickstart-agent", "1", RequestFacts(headers={}, last_user=("Please: Write a summary",)), Role.MAIN),
    ("claude-code", "2.1.220", RequestFacts(headers={"x-claude-code-session-id": "s"}), Role.MAIN),
    ("claude-code", "2.1.332", RequestFacts(headers={"x-claude-code-agent-id": "a1"}), Role.SUB_AGENT),
    ("claude-code", "2.1.220", RequestFacts(headers={}, system="x; cc_is_subagent=true;"), Role.SUB_AGENT),
    (
        "claude-code",
        "2.1.220",
        RequestFacts(headers={}, last_user=("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",)),
        Role.MAIN_SUMMARY,
    ),
    ("claude-code", "2.1.220", RequestFacts(headers={}, output_format="json_schema"), Role.AUX),
    ("claude-code", "2.1.220", RequestFacts(headers={}, output_format="json_schema", tool_names=("Bash",)), Role.MAIN),
    ("claude-code", "2.1.220", RequestFacts(headers={}, tool_names=("web_search",)), Role.AUX),
    ("claude-agent-sdk", "0.2.189", RequestFacts(headers={"x-claude-code-agent-id": "a1"}), Role.SUB_AGENT),
    ("smolagents", "1.26.0", RequestFacts(headers={}), Role.MAIN),
    (
        "qwen-code",
        "0.24.4",
        RequestFacts(
            headers={}, system="You are now acting as the managed memory extraction subagent", tool_names=("e",)
        ),
        Role.AUX,
    ),
    (
        "qwen-code",
        "0.24.4",
        RequestFacts(
            headers={},
            system="You are Qwen Code",
            last_user=("You are the component that summarizes a conversation when",),
            tool_names=("edit",),
        ),
        Role.MAIN_SUMMARY,
    ),
    ("qwen-code", "0.24.4", RequestFacts(headers={}, system="You are Qwen Code", tool_names=("edit",)), Role.MAIN),
    (
        "qwen-code",
        "0.24.4",
        RequestFacts(headers={}, system="You are a general-purpose subagent working for a parent agent."),
        Role.SUB_AGENT,
    ),
    (
        "qwen-code",
        "0.24.4",
        RequestFacts(headers={}, system="You are the component that summarizes a conversation when"),
        Role.MAIN_SUMMARY,
    ),
    ("codex", "0.171.0", RequestFacts(headers={"x-openai-subagent": "collab_spawn"}), Role.SUB_AGENT),
    (
        "codex",
        "0.171.0",
        RequestFacts(headers={"x-codex-turn-metadata": '{"a":1,"request_kind":"compaction"}'}),
        Role.MAIN_SUMMARY,
    ),
    ("codex", "0.171.0", RequestFacts(headers={"x-codex-turn-metadata": '{"request_kind":"turn"}'}), Role.MAIN),
    ("opencode", "1", RequestFacts(headers={}, system="You are a title generator. You output"), Role.AUX),
    ("opencode", "1", RequestFacts(headers={"x-parent-session-id": "ses"}), Role.SUB_AGENT),
    ("mini-swe-agent", "2.4.6", RequestFacts(headers={}, system="anything"), Role.MAIN),
]


@pytest.mark.parametrize(("harness", "version", "facts", "role"), CASES)
def test_request_of_a_known_harness_has_its_role(harness: str, version: str, facts: RequestFacts, role: Role) -> None:
    table = find_table(BUILTIN_TABLES, harness, version)
    assert table is not None and table.role(facts) is role


def test_unknown_harness_has_no_table() -> None:
    assert find_table(BUILTIN_TABLES, "nobody", "1") is None


def test_table_of_a_version_is_found_before_the_general_one() -> None:
    special = RoleTable(harness="claude-code", versions="3.*", sub_agent=(Matcher(header="x-new"),))
    tables = (special, *BUILTIN_TABLES)
    assert find_table(tables, "claude-code", "3.1") is special
    assert find_table(tables, "claude-code", "2.1.220") is not special


def test_table_from_configuration() -> None:
    table = role_table(
        {"harness": "mine", "versions": "1.*", "summary": [{"last_user_starts": "Sum up", "no_tools": True}]}
    )
    assert table.role(RequestFacts(headers={}, last_user=("Sum up",))) is Role.MAIN_SUMMARY
    assert table.role(RequestFacts(headers={}, last_user=("Sum up",), tool_names=("t",))) is Role.MAIN


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"harness": "x", "subagent": []}, "unknown keys"),
        ({"harness": "x", "aux": [{"header_is": "y"}]}, "unknown conditions"),
        ({"harness": "x", "aux": [{}]}, "would match every request"),
        ({"harness": ""}, "needs a harness"),
    ],
)
def test_bad_table_from_configuration_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        role_table(fields)
