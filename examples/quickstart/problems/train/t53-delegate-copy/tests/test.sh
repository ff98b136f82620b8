#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Let a sub-agent do this: Append ivory to menu.txt.
[ "$(tail -n 1 menu.txt 2> /dev/null)" = ivory ] && points=$((points + 3))
is menu.txt 'mango
flame
ivory' && points=$((points + 3))
# Copy items.txt to notes.txt.
is notes.txt 'sugar ivory
ocean lemon' && points=$((points + 3))
is notes.txt 'sugar ivory
ocean lemon' && is items.txt 'sugar ivory
ocean lemon' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
