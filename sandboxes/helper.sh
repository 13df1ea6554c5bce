# The inner end where there is no Python: one POSIX shell for each request, started by the engine's exec as
#
#     sh -c 'eval "$1"' ID THIS-FILE OPERATION [ARGUMENT ...]
#
# It needs readlink, stat, head, tail, cat, dd, mv, rm, mkdir, rmdir and chmod, of GNU or of busybox. The last word goes
# to standard error, after a zero byte and the ID, and means what runner.py's does; what a program writes there comes
# before. Data goes to standard output.
#
# What the engine's exec starts has no parent in here, and no program can make itself such a process: that tells calls
# from what they left behind. Whatever lost its parents belongs to nobody, and dies when a call ends, any call.
shift
id=$0 operation=$1
shift
unset OLDPWD
case $operation in
%*) # what is no UTF-8 cannot pass the engine as it is: every argument is written for printf %b
    operation=${operation#%} count=$#
    while [ "$count" -gt 0 ]; do
        word=$(printf '%bx' "$1")
        set -- "$@" "${word%x}"
        shift
        count=$((count - 1))
    done
    ;;
esac

fed=''
leave() { # an engine whose input for a program finds no reader forgets its output: so read until the gateway has heard us
    [ -z "$fed" ] || cat <&3 >/dev/null
    exit 0
}

last() {
    unset IFS
    printf '\0%s %s\n' "$id" "$*" >&2
    leave
}

# --- the process tree; nothing here forks, since processes may be used up

sweep() { # kills all but what is below another exec than $1, until there is nothing; counts in $killed
    tries=0 killed=0 seen=' '
    while :; do
        pairs='' kept=' '
        for folder in /proc/[0-9]*; do
            state='' parent=''
            {
                while read -r key value _; do
                    case $key in
                    State:) state=$value ;;
                    PPid:) parent=$value && break ;;
                    esac
                done <"$folder/status"
            } 2>/dev/null
            pid=${folder#/proc/}
            case $state:$parent:$pid in
            Z:* | X:* | :* | *:0:1 | *:0:"$1") ;;
            *:0:*) kept="$kept$pid " ;;
            *) pairs="$pairs $pid:$parent" ;;
            esac
        done
        grown=1
        while [ "$grown" = 1 ]; do
            grown=0 rest=''
            for pair in $pairs; do
                case $kept in
                *" ${pair#*:} "*) kept="$kept${pair%:*} " grown=1 ;;
                *) rest="$rest $pair" ;;
                esac
            done
            pairs=$rest
        done
        found=0
        for pair in $pairs; do
            pid=${pair%:*}
            kill -9 "$pid" 2>/dev/null || continue # the container's own idle program is another user's
            found=1
            case $seen in
            *" $pid "*) ;;
            *) seen="$seen$pid " killed=$((killed + 1)) ;;
            esac
        done
        [ "$found" = 0 ] && return 0
        tries=$((tries + 1))
        [ "$tries" -gt 2000 ] && return 1
    done
}

started_as() { # prints the process of the exec with the ID $1
    for folder in /proc/[0-9]*; do
        parent='' line=''
        {
            while read -r key value _; do
                [ "$key" = PPid: ] && parent=$value && break
            done <"$folder/status"
            [ "$parent" = 0 ] && IFS= read -r line <"$folder/cmdline"
        } 2>/dev/null
        case $line in
        *"$1"*) [ "${folder#/proc/}" = "$$" ] || { target=${folder#/proc/} && return; } ;;
        esac
    done
    target=0
}

# --- paths

rooted() { # whether an absolute path is below a place of the file tools
    case $1/ in
    /workspace/* | /home/agent/* | /tmp/*) return 0 ;;
    esac
    return 1
}

there() { [ -e "$1" ] || [ -L "$1" ]; }

refuse() { # says why $1, which cannot be used, cannot be
    here=$1
    while ! there "$here"; do
        here=${here%/*}
        here=${here:-/}
    done
    if [ -d "$here" ] && [ ! -x "$here" ]; then last file permission_denied; fi
    if [ "$here" != "$1" ] && { [ -d "$here" ] || [ -L "$here" ]; }; then last file missing_file; fi
    last file invalid_path
}

failed() { # says what the words of a program that failed, and its status, mean
    case $1 in
    *'No space'* | *'too large'* | *quota*) last file disk_full ;;
    *[Dd]enied* | *'Read-only'* | *'not permitted'*) last file permission_denied ;;
    *'No such file'*) last file missing_file ;;
    *'too long'*) last file invalid_path ;;
    esac
    [ "$2" = 153 ] && last file disk_full # SIGXFSZ
    last file sandbox_helper_failed
}

enter() { # goes to the folder $1 without following a link; with $2 it makes what is missing
    rooted "$1" || last file invalid_path
    case $1/ in
    /home/agent/*) top=/home/agent ;;
    /tmp/*) top=/tmp ;;
    *) top=/workspace ;;
    esac
    cd -P "$top" 2>/dev/null || last file permission_denied
    set -f
    IFS=/
    for name in ${1#"$top"}; do
        [ -n "$name" ] || continue
        [ -L "./$name" ] && last file invalid_path
        if [ ! -d "./$name" ]; then
            there "./$name" && last file invalid_path
            [ -x . ] || last file permission_denied
            [ -n "$2" ] || last file missing_file
            words=$(mkdir -- "./$name" 2>&1) || [ -d "./$name" ] || failed "$words" 1
        fi
        cd "./$name" 2>/dev/null || last file permission_denied
    done
    unset IFS
    set +f
}

leaf() { # goes to the folder of $1, and leaves its last name in $name; a place itself has none
    case $1 in
    /workspace | /home/agent | /tmp) name='' ;;
    *) enter "${1%/*}" "$2" && name=${1##*/} ;;
    esac
}

# --- listing

some='' # the words "$1" ... "$250", for eval
show() { # prints a number of names, the names, and a line for each; then what is below those that are folders
    lines=$(stat -c '%f %s %Y' -- "$@" 2>/dev/null) || {
        [ $# -gt 1 ] && for one in "$@"; do show "$one"; done
        return 0 # it is gone
    }
    left=$((left - $#))
    printf '%s\0' "$#"
    for one in "$@"; do printf '%s\0' "$prefix${one#./}"; done
    printf '%s\n' "$lines"
    [ "$recursive" = 1 ] || return 0
    for one in "$@"; do
        if [ -d "$one" ] && [ ! -L "$one" ]; then below "$one"; fi
    done
}

below() {
    if [ "$depth" -ge 100 ] || ! cd -P "$1" 2>/dev/null; then
        complete=0
        return
    fi
    local before=$prefix
    prefix=$prefix${1#./}/ depth=$((depth + 1))
    folder
    prefix=$before depth=$((depth - 1))
    cd -P ..
}

folder() { # shows what is in the folder where we are
    [ -r . ] || complete=0
    set -- ./*
    there "$1" || shift
    set -- ./.[!.]* "$@"
    there "$1" || shift
    set -- ./..?* "$@"
    there "$1" || shift
    while [ $# -gt 0 ]; do
        if [ $# -gt 250 ] && [ "$left" -ge 250 ]; then
            eval "show $some"
            shift 250
        elif [ "$left" -ge $# ]; then
            show "$@"
            return
        elif [ "$left" -gt 0 ]; then
            show "$1"
            shift
        else
            complete=0
            return
        fi
    done
}

# --- operations

case $operation in
run) # FED FOLDER PROGRAM [ARGUMENT ...]; FED is empty where there is no input
    fed=$1
    shift
    exec 3<&0
    cd -P -- "$1" 2>/dev/null || refuse "$1"
    rooted "$PWD" || last file invalid_path
    shift
    error=ENOENT found=''
    case $1 in
    */*) set -- "$@" && [ -e "$1" ] && error=EACCES && [ -x "$1" ] && [ ! -d "$1" ] && found=1 ;;
    ?*)
        set -f
        IFS=:
        for place in $PATH; do
            [ -x "$place/$1" ] && [ ! -d "$place/$1" ] && found=1
        done
        unset IFS
        set +f
        ;;
    esac
    [ -n "$found" ] || last errno "$error"
    printf '\0%s spawned\n' "$id" >&2
    session=env
    command -v setsid >/dev/null && session=setsid
    (exec "$session" -- "$@") <&3 3<&- &
    main=$!
    exec </dev/null
    if [ -n "${BASH_VERSION-}" ]; then
        wait "$main" 2>/dev/null
        status=$?
        sweep $$ || last stuck
        last ended "$killed" "Done($status)"
    fi
    wait 2>/dev/null
    sweep $$ || last stuck
    printf '\0%s ended %s ' "$id" "$killed" >&2
    jobs >&2 # the one word of a shell that tells a signal from a status
    leave
    ;;
kill) # ID
    started_as "$1"
    [ "$target" = 0 ] || kill -CONT "$target" 2>/dev/null
    sweep "$target" || last stuck
    last "done" "$killed" 1
    ;;
read) # PATH START END FOLLOW; END may be empty
    path=$(readlink -nf -- "$1" && printf x)
    path=${path%x}
    [ -n "$path" ] || { [ -L "$1" ] && last file invalid_path; refuse "$1"; }
    rooted "$path" || last file invalid_path
    [ "$4" = 1 ] || [ "$path" = "$1" ] || last file invalid_path
    there "$path" || refuse "$path"
    [ -f "$path" ] || last file invalid_path
    [ -r "$path" ] || last file permission_denied
    end=$(stat -c %s -- "$path")
    [ -n "$3" ] && [ "$3" -lt "$end" ] && end=$3
    [ "$2" -lt "$end" ] || last "done" 0 1
    if [ "$2" = 0 ]; then
        head -c "$end" -- "$path" 2>/dev/null
    else
        tail -c "+$(($2 + 1))" -- "$path" 2>/dev/null | head -c "$((end - $2))" 2>/dev/null
    fi
    last "done" "$((end - $2))" 1
    ;;
write) # PATH MODE; the content ends with the ID, else the file is not made
    fed=1
    exec 3<&0
    umask 022
    leaf "$1" make
    [ -n "$name" ] || last file invalid_path
    if there "./$name" && [ ! -L "./$name" ] && [ ! -f "./$name" ]; then last file invalid_path; fi
    part=./.sandgate-$id
    umask 077
    words=$(cat 2>&1 >"$part")
    status=$?
    if [ "$status" != 0 ]; then
        rm -f "$part"
        failed "$words" "$status"
    fi
    size=$(($(stat -c %s "$part") - ${#id}))
    if [ "$size" -lt 0 ] || [ "$(tail -c "${#id}" "$part" | head -c "${#id}" 2>/dev/null)" != "$id" ]; then
        rm -f "$part"
        last signal 9 0
    fi
    dd if=/dev/null of="$part" bs=1 seek="$size" 2>/dev/null
    [ -L "./$name" ] && rm -f "./$name"
    words=$(chmod "$2" "$part" 2>&1 && mv -f "$part" "./$name" 2>&1) || {
        rm -f "$part"
        failed "$words" 1
    }
    last "done" "$size" 1
    ;;
list) # PATH RECURSIVE MOST
    LC_ALL=C recursive=$2 left=$3 prefix='' depth=0 complete=1
    i=0
    while [ "$i" -lt 250 ]; do i=$((i + 1)) && some="$some \"\${$i}\""; done
    leaf "$1"
    if [ -z "$name" ]; then
        cd -P "$1"
    elif ! there "./$name"; then
        refuse "$1"
    elif [ -L "./$name" ] || [ ! -d "./$name" ]; then
        recursive=0
        line=$(stat -c '%f %s %Y' -- "./$name") || last file missing_file
        printf '1\0.\0%s\n' "$line"
        last "done" 1 1
    else
        cd -P "./$name" 2>/dev/null || last file permission_denied
    fi
    [ -r . ] || last file permission_denied
    folder
    last "done" 1 "$complete"
    ;;
remove) # PATH RECURSIVE
    leaf "$1"
    [ -n "$name" ] || last file invalid_path
    there "./$name" || refuse "$1"
    if [ -L "./$name" ] || [ ! -d "./$name" ]; then
        words=$(rm -f -- "./$name" 2>&1) || failed "$words" 1
    elif [ "$2" = 1 ]; then
        rm -rf -- "./$name" 2>/dev/null
        there "./$name" && chmod -R u+rwX -- "./$name" 2>/dev/null && rm -rf -- "./$name" 2>/dev/null
        there "./$name" && last file permission_denied
    else
        words=$(rmdir -- "./$name" 2>&1) || case $words in
        *mpty*) last file invalid_path ;;
        *) failed "$words" 1 ;;
        esac
    fi
    last "done" 1 1
    ;;
esac
