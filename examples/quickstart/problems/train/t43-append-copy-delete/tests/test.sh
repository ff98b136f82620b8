#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Append earth to plan.txt.
[ "$(tail -n 1 plan.txt 2> /dev/null)" = earth ] && points=$((points + 3))
is plan.txt 'paint
flame
earth' && points=$((points + 3))
# Copy list.txt to diary.txt.
is diary.txt 'grape
ivory' && points=$((points + 3))
is diary.txt 'grape
ivory' && is list.txt 'grape
ivory' && points=$((points + 3))
# Delete draft.txt.
[ ! -e draft.txt ] && is story.txt 'daisy' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
