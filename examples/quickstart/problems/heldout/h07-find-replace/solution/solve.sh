#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
grep bacon memo.txt > agenda.txt
sed -i s/cabin/actor/ paper.txt
