//! Which of a library's answers proved fastest, kept on disk by GPU and library. The library's first answer is
//! its guess; another of its answers is up to a tenth faster for some products. What was measured once is
//! kept, because another algorithm rounds differently: runs on one machine should not vary with the weather.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use crate::random::key_of;

/// Ways are measured in turn, so often, and their middle times compared: others may be at work on the GPU, now more, now less.
const ROUNDS: usize = 5;
/// How much longer than the quickest one may take to be measured on.
const HOPELESS: f32 = 1.5;
/// How much faster than the first another must be: less is noise.
const CLEARLY_FASTER: f32 = 0.97;

/// Which of some ways is the fastest; the first, unless another is clearly faster. `measure` says how long one took.
pub(super) fn fastest<E>(ways: usize, mut measure: impl FnMut(usize) -> Result<f32, E>) -> Result<usize, E> {
    // By way, what it took, the shortest first.
    let mut times: Vec<Vec<f32>> = vec![Vec::new(); ways];
    let mut bound = f32::INFINITY;
    for _ in 0..ROUNDS {
        for (way, times) in times.iter_mut().enumerate() {
            if times.first().is_none_or(|least| *least <= bound) {
                times.push(measure(way)?);
                times.sort_by(f32::total_cmp);
            }
        }
        let least = times.iter().filter_map(|times| times.first()).copied().fold(f32::INFINITY, f32::min);
        bound = HOPELESS * least;
    }
    let middle = |way: usize| times.get(way).and_then(|times| times.get(times.len() / 2)).copied();
    let Some(first) = middle(0) else { return Ok(0) };
    let time = |way: &usize| middle(*way).unwrap_or(f32::INFINITY);
    let best = (0..ways).min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(0);
    Ok(if time(&best) < CLEARLY_FASTER * first { best } else { 0 })
}

pub(super) struct Ranks {
    path: Option<PathBuf>,
    /// By the hash of a question's description: the answer to take, from 0.
    known: HashMap<u64, usize>,
}

impl Ranks {
    /// What is known of a kind of question, of a GPU model and of a library with its version. A folder that
    /// cannot be read holds nothing.
    pub(super) fn read(folder: Option<PathBuf>, kind: &str, gpu: &str, library: &str) -> Ranks {
        let plain: String = gpu.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
        let name = format!("{kind}-{}-{library}", plain.to_lowercase());
        let path = folder.map(|folder| folder.join(name));
        let text = path.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        let line = |line: &str| {
            let (key, rank) = line.split_once(' ')?;
            Some((u64::from_str_radix(key, 16).ok()?, rank.parse().ok()?))
        };
        Ranks { path, known: text.lines().filter_map(line).collect() }
    }

    pub(super) fn get(&self, question: &str) -> Option<usize> {
        self.known.get(&key_of(question)).copied()
    }

    /// Keeps a measurement. That the disk refuses it is no error: the next start measures again.
    pub(super) fn keep(&mut self, question: &str, rank: usize) {
        let key = key_of(question);
        self.known.insert(key, rank);
        let Some(path) = &self.path else { return };
        let line = format!("{key:016x} {rank}\n");
        // One write of one line: several processes may append.
        let _ = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_is_clearly_so_most_of_the_time() {
        // What is asked for first is disturbed.
        let measured = |times: &[f32], disturbed: usize| {
            let mut asked = 0;
            fastest::<()>(times.len(), |way| {
                asked += 1;
                Ok(if asked <= disturbed { 1.4 * times[way] } else { times[way] })
            })
        };
        assert_eq!(measured(&[], 0), Ok(0));
        assert_eq!(measured(&[2.0, 3.0, 1.0], 0), Ok(2));
        assert_eq!(measured(&[2.0, 1.99], 0), Ok(0), "noise");
        assert_eq!(measured(&[2.0, 1.9], 3), Ok(1), "the first of two rounds of two, and half the second");
        let mut asked = [0; 3];
        let best = fastest::<()>(3, |way| {
            asked[way] += 1;
            Ok([1.0, 1.2, 2.0][way])
        });
        assert_eq!((best, asked), (Ok(0), [5, 5, 1]), "what is hopeless is not measured on");
        assert_eq!(fastest(2, |_| Err("lost")), Err("lost"));
    }

    #[test]
    fn what_was_kept_is_read_again_and_noise_is_passed_over() {
        let folder = std::env::temp_dir().join(format!("shoal-ranks-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let read = || Ranks::read(Some(folder.clone()), "products", "NVIDIA X/1", "cublaslt13");
        let mut ranks = read();
        assert_eq!(ranks.get("a"), None);
        ranks.keep("a", 3);
        ranks.keep("b", 0);
        std::fs::write(folder.join("products-nvidia-x-1-cublaslt13"), {
            let text = std::fs::read_to_string(folder.join("products-nvidia-x-1-cublaslt13")).unwrap();
            format!("{text}torn li\n\u{0}\nzz 5\n")
        })
        .unwrap();
        let again = read();
        assert_eq!((again.get("a"), again.get("b"), again.get("c")), (Some(3), Some(0), None));
        std::fs::remove_dir_all(&folder).unwrap();
        let mut nowhere = Ranks::read(None, "products", "X", "cublaslt1");
        nowhere.keep("a", 1);
        assert_eq!(nowhere.get("a"), Some(1));
    }
}
