#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/yacht/eagle/ draft.txt
rm list.txt
sed -n 3p quote.txt > notes.txt
