"""What a call is to its rollout, read from the request by a table that is data.

Enters: `RequestFacts` of a request. Leaves: a `Role`, or "nobody knows this harness" (MAIN and a counter upstream). A
table belongs to a harness and a pattern of its versions; `role_table` reads further ones from configuration, so that a
new harness needs no code. Two questions are asked apart and combined: is it a sub-agent, is it a summary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from gyre_core.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What matchers may look at.

    Example: RequestFacts(headers={"x-agent-parent": "main"}, system="You are ...", last_user=("Write a summary",))
    """

    headers: Mapping[str, str]  # lower-case names
    system: str = ""  # all system text before the first other message, blocks joined by line ends
    last_user: tuple[str, ...] = ()  # text blocks of the last user message
    tool_names: tuple[str, ...] = ()
    output_format: str = ""  # type of structured output asked for ("json_schema"), else empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """Conditions that must all hold; one that is left out is not asked.

    Example: Matcher(header="x-openai-subagent")
    """

    header: str = ""  # this header is present and not empty
    header_contains: str = ""  # and holds this text
    system_contains: str = ""
    last_user_starts: str = ""  # some text block of the last user message starts so (leading whitespace ignored)
    no_tools: bool = False
    only_tool: str = ""  # exactly this tool is offered
    output_format: str = ""

    def __post_init__(self) -> None:
        asked = (self.header, self.system_contains, self.last_user_starts, self.only_tool, self.output_format)
        if not any(asked) and not self.no_tools:
            raise ValueError("a role matcher without a condition would match every request")

    def matches(self, facts: RequestFacts) -> bool:
        """Whether all conditions hold."""
        value = facts.headers.get(self.header, "") if self.header else ""
        return (
            (not self.header or (bool(value) and self.header_contains in value))
            and self.system_contains in facts.system
            and (
                not self.last_user_starts
                or any(text.lstrip().startswith(self.last_user_starts) for text in facts.last_user)
            )
            and (not self.no_tools or not facts.tool_names)
            and (not self.only_tool or facts.tool_names == (self.only_tool,))
            and (not self.output_format or facts.output_format == self.output_format)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTable:
    """How the versions of one harness show roles.

    Example: RoleTable(harness="quickstart-agent", sub_agent=(Matcher(header="x-agent-parent"),))
    """

    harness: str
    versions: str = "*"  # shell pattern
    aux: tuple[Matcher, ...] = ()  # never trained; asked first
    sub_agent: tuple[Matcher, ...] = ()
    summary: tuple[Matcher, ...] = ()
    hints: tuple[str, ...] = field(default=())  # headers kept in the call's record

    def role(self, facts: RequestFacts) -> Role:
        """The role of a request."""
        if any(matcher.matches(facts) for matcher in self.aux):
            return Role.AUX
        is_summary = any(matcher.matches(facts) for matcher in self.summary)
        if any(matcher.matches(facts) for matcher in self.sub_agent):
            return Role.SUB_AGENT_SUMMARY if is_summary else Role.SUB_AGENT
        return Role.MAIN_SUMMARY if is_summary else Role.MAIN


_CLAUDE_CODE = RoleTable(
    harness="claude-code",
    aux=(Matcher(output_format="json_schema", no_tools=True), Matcher(only_tool="web_search")),
    sub_agent=(Matcher(header="x-claude-code-agent-id"), Matcher(system_contains="cc_is_subagent=true")),
    summary=(Matcher(last_user_starts="CRITICAL: Respond with TEXT ONLY"),),
    hints=("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
)

# Measured on the wire: Claude Code 2.1.220 and 2.1.332, Qwen Code 0.24.4, Codex 0.171.0, opencode 1.18.33,
# mini-swe-agent 2.4.6. A version that shows roles in another way gets a table of its own above the general one.
BUILTIN_TABLES: tuple[RoleTable, ...] = (
    RoleTable(
        harness="quickstart-agent",
        sub_agent=(Matcher(header="x-agent-parent"),),
        summary=(Matcher(last_user_starts="Write a summary"),),
        hints=("x-agent-parent", "x-agent-id"),
    ),
    _CLAUDE_CODE,
    replace(_CLAUDE_CODE, harness="claude-agent-sdk"),  # runs Claude Code
    RoleTable(
        harness="qwen-code",
        aux=(Matcher(system_contains="managed memory extraction subagent"),),
        sub_agent=(Matcher(system_contains="subagent working for a parent agent"),),
        summary=(
            Matcher(system_contains="the component that summarizes a conversation", no_tools=True),
            # After an error about the context's length: same system and tools as the main agent.
            Matcher(last_user_starts="You are the component that summarizes a conversation"),
        ),
    ),
    RoleTable(
        harness="codex",
        sub_agent=(Matcher(header="x-openai-subagent"), Matcher(header="x-codex-parent-thread-id")),
        summary=(
            Matcher(header="x-codex-turn-metadata", header_contains='"request_kind":"compaction"'),
            Matcher(last_user_starts="You are performing a CONTEXT CHECKPOINT COMPACTION"),
        ),
        hints=("session-id", "thread-id", "x-codex-window-id", "x-openai-subagent", "x-codex-parent-thread-id"),
    ),
    RoleTable(
        harness="opencode",
        aux=(Matcher(system_contains="You are a title generator", no_tools=True),),
        sub_agent=(Matcher(header="x-parent-session-id"),),
        summary=(Matcher(system_contains="You are a context summarization agent", no_tools=True),),
        hints=("x-session-id", "x-parent-session-id"),
    ),
    RoleTable(harness="mini-swe-agent"),
    RoleTable(harness="smolagents"),  # its managed agents show nothing that lasts: they count as main
)


def find_table(tables: Iterable[RoleTable], harness: str, version: str) -> RoleTable | None:
    """The first table whose harness and version pattern fit, None for an unknown harness."""
    for table in tables:
        if table.harness == harness and fnmatchcase(version, table.versions):
            return table
    return None


def role_table(fields: Mapping[str, Any]) -> RoleTable:
    """A table from configuration; raises ValueError that names an unknown key or an empty matcher.

    Example: role_table({"harness": "my-agent", "sub_agent": [{"header": "x-parent"}]})
    """
    known = set(RoleTable.__dataclass_fields__)
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"role table has unknown keys {unknown}; known are {sorted(known)}")
    if not fields.get("harness"):
        raise ValueError("role table needs a harness")
    matchers = {key: _matchers(key, fields.get(key, ())) for key in ("aux", "sub_agent", "summary")}
    return RoleTable(
        harness=fields["harness"],
        versions=fields.get("versions", "*"),
        hints=tuple(name.lower() for name in fields.get("hints", ())),
        **matchers,
    )


def _matchers(key: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Matcher, ...]:
    known = set(Matcher.__dataclass_fields__)
    for row in rows:
        if unknown := sorted(set(row) - known):
            raise ValueError(f"role table, {key}: unknown conditions {unknown}; known are {sorted(known)}")
    return tuple(Matcher(**row) for row in rows)
