# length.awk - functions of at most 70 lines, files of at most 1,000; notes over 500 lines and for nesting over 4.
# Relies on the tree's style: a function's braces stand alone in the first column, a level is four blanks.

function end_file() {
    if (name == "")
        return
    if (lines > 1000) {
        print name ": " lines " lines; at most 1000: split it by concern"
        bad = 1
    } else if (lines > 500)
        print "note " name ": " lines " lines; better under 500"
}

FNR == 1 { end_file(); name = FILENAME; head = ""; start = 0 }
{ lines = FNR }
/^[a-zA-Z_].*\(/ && !start { head = $0; sub(/\(.*/, "", head); sub(/.*[ *]/, "", head) }
/^\{$/ { start = FNR; deepest = 0 }
start && /^ +(if|for|while|switch|do)[ ({]/ {
    match($0, /^ +/)
    if (RLENGTH / 4 > deepest) {
        deepest = RLENGTH / 4
        deepest_line = FNR
    }
}
/^\}$/ && start {
    if (FNR - start + 1 > 70) {
        print FILENAME ":" start ": " head "() has " FNR - start + 1 " lines; at most 70: split it"
        bad = 1
    }
    if (deepest > 4)
        print "note " FILENAME ":" deepest_line ": " head "() nests " deepest " deep; better 3"
    start = 0
}
END { end_file(); exit bad }
