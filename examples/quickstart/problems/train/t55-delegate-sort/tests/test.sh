#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Let a sub-agent do this: Copy list.txt to notes.txt.
is notes.txt 'grape koala
apple' && points=$((points + 3))
is notes.txt 'grape koala
apple' && is list.txt 'grape koala
apple' && points=$((points + 3))
# Sort names.txt into diary.txt.
is diary.txt 'dream image
eagle
pearl' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
