//! Compares every solver with the enumeration of all assignments.

use proptest::prelude::*;

use super::*;

/// Every assignment with even loads, up to permutations of CPUs and caches as far as these are cheap to detect.
fn every_seating(programs: usize, seats: &Seats) -> Vec<Seating> {
    fn seat_next(
        program: usize,
        programs: usize,
        limits: (usize, usize),
        partial: &mut Seating,
        seatings: &mut Vec<Seating>,
    ) {
        let (min_load, surplus) = limits;
        if program == programs {
            let even = partial
                .by_cache
                .iter()
                .flatten()
                .all(|cpu| cpu.len() >= min_load);
            if even {
                seatings.push(partial.clone());
            }
            return;
        }

        let max_load = min_load + usize::from(surplus > 0);
        for cache in 0..partial.by_cache.len() {
            for cpu in 0..partial.by_cache[cache].len() {
                if partial.by_cache[cache][cpu].len() < max_load {
                    partial.by_cache[cache][cpu].push(program);
                    seat_next(program + 1, programs, limits, partial, seatings);
                    partial.by_cache[cache][cpu].pop();
                    if partial.by_cache[cache][cpu].is_empty() {
                        break; // further idle CPUs of this cache are the same
                    }
                }
            }
        }
    }

    let by_cache = seats
        .cpus_per_cache
        .iter()
        .map(|&cpus| vec![Vec::new(); cpus as usize])
        .collect();
    let mut seatings = Vec::new();
    seat_next(
        0,
        programs,
        seats.min_load_and_surplus(programs),
        &mut Seating { by_cache },
        &mut seatings,
    );
    seatings
}

fn sample_seats(cpus: &[u32]) -> Seats {
    Seats {
        cpus_per_cache: cpus.to_vec(),
    }
}

fn check_seating(seating: &Seating, programs: usize, seats: &Seats) {
    let mut seated_programs: Vec<usize> = seating
        .by_cache
        .iter()
        .flatten()
        .flatten()
        .copied()
        .collect();
    seated_programs.sort_unstable();
    assert_eq!(
        seated_programs,
        (0..programs).collect::<Vec<_>>(),
        "each program once"
    );
    let mut shapes: Vec<u32> = seating
        .by_cache
        .iter()
        .map(|cache| cache.len() as u32)
        .collect();
    assert_eq!(shapes.len(), seats.cpus_per_cache.len());
    assert_eq!(std::mem::take(&mut shapes), seats.cpus_per_cache);
    let loads: Vec<usize> = seating.by_cache.iter().flatten().map(Vec::len).collect();
    assert!(
        loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1,
        "loads are even: {loads:?}"
    );
}

fn arbitrary_costs(programs: usize, low: f64) -> impl Strategy<Value = Vec<Vec<f64>>> {
    proptest::collection::vec(proptest::collection::vec(low..1.0f64, programs), programs)
}

const SHAPES: [&[u32]; 9] = [
    &[2, 2],
    &[2, 2, 2],
    &[3, 3],
    &[4, 4],
    &[1, 3],
    &[2, 1, 1],
    &[4],
    &[1, 1],
    &[2, 2, 1],
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Do the best and the worst assignment match enumeration for every shape, with idle CPUs, CPUs that take turns,
    /// and negative costs?
    #[test]
    fn best_and_worst_equal_brute_force(
        shape in 0..SHAPES.len(),
        programs in 1usize..=7,
        matrix in arbitrary_costs(7, -0.5),
    ) {
        let seats = sample_seats(SHAPES[shape]);
        let matrix: Vec<Vec<f64>> = matrix[..programs].iter().map(|row| row[..programs].to_vec()).collect();
        let totals: Vec<f64> = every_seating(programs, &seats).iter().map(|s| s.total_cost(&matrix)).collect();
        let (best, worst) = (best_assignment(&matrix, &seats), worst_assignment(&matrix, &seats));
        check_seating(&best.seating, programs, &seats);
        check_seating(&worst.seating, programs, &seats);
        let minimum = totals.iter().copied().fold(f64::INFINITY, f64::min);
        let maximum = totals.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        prop_assert!((best.total - minimum).abs() < 1e-9, "{} {minimum} {:?}", best.total, best.method);
        prop_assert!((worst.total - maximum).abs() < 1e-9, "{} {maximum}", worst.total);
    }

    /// Does the local search preserve even loads, and does its bound not exceed the known optimum?
    #[test]
    fn local_search_preserves_even_loads_and_its_bound_holds(
        shape in 0..SHAPES.len(),
        programs in 1usize..=8,
        matrix in arbitrary_costs(8, -0.5),
    ) {
        let seats = sample_seats(SHAPES[shape]);
        let matrix: Vec<Vec<f64>> = matrix[..programs].iter().map(|row| row[..programs].to_vec()).collect();
        let optimum = best_assignment(&matrix, &seats).total;
        let seating = local_search::solve(&matrix, &seats);
        check_seating(&seating, programs, &seats);
        prop_assert!(local_search::lower_bound(&matrix, &seats) <= optimum + 1e-9);
        prop_assert!(seating.total_cost(&matrix) >= optimum - 1e-9);
    }

    /// Are sixteen programs, each on a CPU of its own, solved exactly on caches of any sizes?
    #[test]
    fn sixteen_programs_always_fit_the_exact_solver(cpus in prop::collection::vec(1u32..=16, 1..=16), programs in 1usize..=16) {
        let seats = sample_seats(&cpus);
        prop_assume!(seats.cpus() >= programs);
        prop_assert!(exact::can_solve(programs, &seats), "{programs} on {cpus:?}");
    }

    /// Does the minimum-weight perfect matching of up to twelve programs, even for odd counts, match brute force?
    #[test]
    fn matchings_up_to_twelve_equal_brute_force(programs in 1usize..=12, matrix in arbitrary_costs(12, -0.3)) {
        let matrix: Vec<Vec<f64>> = matrix[..programs].iter().map(|row| row[..programs].to_vec()).collect();
        let pairs = programs.div_ceil(2);
        let solved = best_assignment(&matrix, &sample_seats(&vec![2; pairs]));
        prop_assert_eq!(solved.method, SolverMethod::Matching);
        fn min_total(remaining: u32, programs: usize, matrix: &[Vec<f64>], idle: usize) -> f64 {
            if remaining == 0 {
                return 0.0;
            }
            let i = remaining.trailing_zeros() as usize;
            let remaining_others = remaining & (remaining - 1);
            let alone = if idle > 0 { min_total(remaining_others, programs, matrix, idle - 1) } else { f64::INFINITY };
            (0..programs)
                .filter(|j| remaining_others >> j & 1 == 1)
                .map(|j| matrix[i][j] + matrix[j][i] + min_total(remaining_others & !(1 << j), programs, matrix, idle))
                .fold(alone, f64::min)
        }
        let optimum = min_total((1 << programs) - 1, programs, &matrix, programs % 2);
        prop_assert!((solved.total - optimum).abs() < 1e-9, "{} {optimum}", solved.total);
    }

    /// Does the exact mean match the mean of many drawn assignments, for every shape?
    #[test]
    fn the_random_mean_is_that_of_drawn_assignments(shape in 0..SHAPES.len(), programs in 2usize..=6, matrix in arbitrary_costs(6, -0.5)) {
        let seats = sample_seats(SHAPES[shape]);
        let matrix: Vec<Vec<f64>> = matrix[..programs].iter().map(|row| row[..programs].to_vec()).collect();
        let mut generator = SplitMix64::new(shape as u64);
        let draws = 6000;
        let sum: f64 = (0..draws).map(|_| random_seating(programs, &seats, &mut generator).total_cost(&matrix)).sum();
        let mean = random_totals(&matrix, &seats, 3).mean;
        let spread = matrix.iter().flatten().map(|cost| cost.abs()).sum::<f64>();
        prop_assert!((sum / f64::from(draws) - mean).abs() < 0.03 * spread.max(0.1), "{} {mean}", sum / f64::from(draws));
    }
}

/// Does the exact mean match enumeration, if every assignment can be listed with its weight?
#[test]
fn the_random_mean_is_exact_on_two_pairs() {
    let matrix = vec![
        vec![0.48, 0.6563, 0.02, 0.0211],
        vec![0.2475, 0.45, 0.0123, 0.0111],
        vec![0.0267, 0.0448, -0.01, -0.0121],
        vec![0.0148, 0.0345, -0.0119, -0.0093],
    ];

    let seats = sample_seats(&[2, 2]);
    let three = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]];
    let total = |pairs: &[(usize, usize); 2]| {
        pairs
            .iter()
            .map(|&(a, b)| matrix[a][b] + matrix[b][a])
            .sum::<f64>()
    };
    let mean = three.iter().map(total).sum::<f64>() / 3.0;
    assert!((random_totals(&matrix, &seats, 1).mean - mean).abs() < 1e-12);
    let drawn = random_totals(&matrix, &seats, 1);
    assert!(
        drawn.low_5_percent >= total(&three[1]) - 1e-12
            && drawn.high_5_percent <= total(&three[0]) + 1e-12
    );
}

/// Are sixteen programs on caches of four and of eight CPUs solved exactly, and does the local search agree within its
/// gap?
#[test]
fn sixteen_programs_are_exact_and_local_search_is_within_gap() {
    let mut generator = SplitMix64::new(42);
    let matrix: Vec<Vec<f64>> = (0..16)
        .map(|_| (0..16).map(|_| generator.draw_unit()).collect())
        .collect();
    for shape in [vec![4; 4], vec![8; 2], vec![8; 8]] {
        let seats = Seats {
            cpus_per_cache: shape,
        };
        let exact = best_assignment(&matrix, &seats);
        assert_eq!(exact.method, SolverMethod::DynamicProgramming);
        let searched = local_search::solve(&matrix, &seats).total_cost(&matrix);
        let bound = local_search::lower_bound(&matrix, &seats);
        assert!(
            bound <= exact.total && exact.total <= searched + 1e-9,
            "{bound} {} {searched}",
            exact.total
        );
        assert!(
            searched <= 1.1 * exact.total + 1e-9,
            "{} {searched}",
            exact.total
        );
    }
}

/// Does a large machine get a valid assignment with a bound that is better than random?
#[test]
fn forty_eight_programs_on_eight_caches_are_bounded() {
    let mut generator = SplitMix64::new(1);
    let hurt: Vec<f64> = (0..48).map(|_| generator.draw_unit()).collect();
    let matrix: Vec<Vec<f64>> = hurt
        .iter()
        .map(|a| hurt.iter().map(|b| a * b * b).collect())
        .collect();
    let seats = Seats {
        cpus_per_cache: vec![8; 8],
    };
    let solved = best_assignment(&matrix, &seats);
    check_seating(&solved.seating, 48, &seats);
    assert_eq!(solved.method, SolverMethod::LocalSearch);
    assert!(
        solved.lower_bound > 0.0 && solved.lower_bound <= solved.total,
        "{solved:?}"
    );
    assert!(solved.total < random_totals(&matrix, &seats, 1).low_5_percent);
    let worst = worst_assignment(&matrix, &seats);
    assert!(worst.total <= worst.lower_bound && worst.total > solved.total);
}

/// With more programs than CPUs, do programs that slow each other down take turns on one CPU?
#[test]
fn programs_that_slow_each_other_down_share_a_cpu() {
    let mut matrix = vec![vec![0.0; 4]; 4];
    (matrix[0][2], matrix[2][0], matrix[1][3], matrix[3][1]) = (0.9, 0.9, 0.8, 0.8);
    let solved = best_assignment(&matrix, &sample_seats(&[2]));
    assert_eq!(solved.seating.by_cache, vec![vec![vec![0, 2], vec![1, 3]]]);
    assert_eq!(solved.total, 0.0);
}
