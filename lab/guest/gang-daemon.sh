# The daemon with the real gang scheduler: gangs that the policy finds by its own probes, kept by sched_ext; sourced by init.

held_by_scheduler() { state >state.json 2>/dev/null && [ "$(count held)" = 4 ]; }
none_held() { state >state.json 2>/dev/null && [ "$(count held)" = 0 ]; }
says() { status | grep -q "$1"; }
idle_turns() { case " $(policies $all) " in *' 5 '*) return 0 ;; esac; return 1; }
not_with_scheduler() { case " $(policies $all) " in *' 7 '*) return 1 ;; esac; return 0; }

scenario_daemon() {
    programs 3072 32768
    victims="$v1 $v2" streams="$s1 $s2"
    usleep 100000
    stretch 0.5 $victims $streams >kernel.tsv
    attach || { report attach "the scheduler is attached" FAIL - "$(tail -n 1 loader.log)" enabled; return; }
    manage "window_ms = 200
[policy]
name = \"intensity-gangs\"
parameters = { window_ns = 200_000_000, slice_ns = 20_000_000 }
$(rules victim-1 victim-2 stream-1 stream-2)"
    pause_us=100000
    within 40 held_by_scheduler
    same held "gangs that the policy found are with the scheduler: threads, policy" "4 7" "$(count held) $(policies $all)"
    same read-back "turns in force, as read back from the kernel, us" "20000 20000" \
        "$(grep -o '"turn_us":[0-9]*' state.json | cut -d: -f2 | tr '\n' ' ' | sed 's/ $//')"
    usleep 200000
    stretch 0.8 $victims $streams >worth.tsv
    near gain "a victim's access under the daemon with sched_ext, ns: measured, and by the law" "$(of worth.tsv 3 $victims)" "$(law 20)" 10
    report streams "victims and streams meanwhile, against the kernel alone" note - \
        "$(awk "BEGIN { printf \"%.2f %.2f\", $(of worth.tsv 2 $victims) / $(of kernel.tsv 2 $victims), $(of worth.tsv 2 $streams) / $(of kernel.tsv 2 $streams) }")" -
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'

    kill -9 "$loader"
    wait "$loader" 2>/dev/null
    within 10 not_with_scheduler
    same killed "kill -9 of the loader: no program has the scheduler's policy, sched_ext is" "yes disabled" \
        "$(not_with_scheduler && echo yes || echo "$(policies $all)") $(cat /sys/kernel/sched_ext/state)"
    within 10 idle_turns
    same idle "gangs go on as idle turns (policy 5 in its turn)" yes "$(idle_turns && echo yes || policies $all)"
    report said "and status says" note "$(status | grep -o 'the gang scheduler[^"]*' | head -n 1)" - -
    attach && within 20 held_by_scheduler
    same again "the loader started again gets the plan again: threads, policy" "4 7" "$(count held) $(policies $all)"
    kill -9 "$(status | awk -F '[:,]' '/"guardian_pid"/ { print $2 + 0; exit }')" "$daemon"
    wait "$daemon" 2>/dev/null
    cachemate --quiet restore --state-dir state >restore.log 2>&1
    same reset "kill -9 of daemon and guardian, then reset: policies" 0 "$(policies $all)"
    echo '{"stop":{}}' | gangs send >answer
    within 5 ended "$loader"
    same stop "after stop the policies and sched_ext are as before" "0 disabled" "$(policies $all) $(cat /sys/kernel/sched_ext/state)"
    kill $all
}
