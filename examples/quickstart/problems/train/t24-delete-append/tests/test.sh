#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Delete notes.txt.
[ ! -e notes.txt ] && is recipe.txt 'dream' && points=$((points + 6))
# Append uncle to index.txt.
[ "$(tail -n 1 index.txt 2> /dev/null)" = uncle ] && points=$((points + 3))
is index.txt 'koala radio
north beach
uncle' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
