//! Whatever anybody sends, nothing panics, and nobody without credentials gets an answer. Inputs are good ones that were
//! changed at random places, from a seed. SHOAL_FUZZ says how many; a million takes minutes.

use crate::common::*;
use shoal_control::message::{JobId, Price, Report, Status, ToController, WorkerId};
use shoal_net::identity::{Applicant, Authority};
use shoal_service::api::{self, JoinRequest, Peer, TokenRequest};
use shoal_service::http::Target;
use shoal_service::server::serve_stream;
use shoal_service::token::JoinToken;
use shoal_service::wire::{self, StepLine, Up};
use shoal_service::{folder::Folder, guard, token::Roll};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const INPUTS: u64 = 20_000;

fn inputs() -> u64 {
    let told = std::env::var("SHOAL_FUZZ").ok();
    told.map_or(INPUTS, |told| told.parse().expect("SHOAL_FUZZ is a number of inputs"))
}

/// Marsaglia's xorshift: enough for choosing places.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    /// Changes bytes, cuts, doubles and mixes with another input.
    fn mutate(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        const TELLING: &[u8] = b"\0\r\n \t\"'{}[]:,.;/\\%&=?#@-+0919aZ\x7f\x80\xff";
        let mut bytes = seeds[self.below(seeds.len())].clone();
        for _ in 0..self.below(6) {
            let at = self.below(bytes.len());
            match self.below(6) {
                0 if !bytes.is_empty() => bytes[at] = self.below(256) as u8,
                1 if !bytes.is_empty() => bytes[at] = TELLING[self.below(TELLING.len())],
                2 => bytes.truncate(at),
                3 => {
                    let end = (at + self.below(32)).min(bytes.len());
                    bytes.drain(at..end);
                }
                4 => {
                    let end = (at + self.below(64)).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    bytes.splice(at..at, piece);
                }
                _ => {
                    let other = &seeds[self.below(seeds.len())];
                    let from = self.below(other.len());
                    let end = (from + self.below(64)).min(other.len());
                    bytes.splice(at..at, other[from..end].iter().copied());
                }
            }
        }
        bytes
    }
}

#[test]
fn what_is_read_from_others_never_panics() {
    let report = Report {
        worker: WorkerId(3),
        number: 7,
        revision: 9,
        leaving_in_ms: Some(1),
        jobs: [(JobId(1), Status::default())].into(),
    };
    let join =
        ToController::Join { name: "one".into(), boot: 1, about: "{}".into(), price: Price::default() };
    let record = serde_json::json!({ "loss": 1.5, "mfu": { "cpu": 0.5 } });
    let line = StepLine { step: 4, record: record.as_object().expect("an object").clone() };
    let ups = [
        Up::Control(ToController::Report(report)),
        Up::Control(join),
        Up::Steps { job: JobId(1), lines: vec![line] },
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let folder = Folder::open(folder.path()).expect("it opens");
    let (token, _) = Roll::default().make(&folder, blake3::hash(b"x"), 1, 5, Some("one")).expect("a token");
    let json = |value: &dyn erased::Json| value.bytes();
    let mut seeds: Vec<Vec<u8>> = ups.iter().map(|up| json(up)).collect();
    seeds.push(json(&spec("toy", 9)));
    seeds.push(json(&TokenRequest { minutes: 5, worker: Some("one".into()) }));
    seeds.push(json(&JoinRequest { name: "one".into(), request: "-----BEGIN".into() }));
    let texts = ["127.0.0.1:7700", "[::1]:1", "https://127.0.0.1:7700", "Bearer x", "after=1&wait_ms=2"];
    seeds.extend(texts.iter().map(|text| text.as_bytes().to_vec()));
    seeds.push(token.to_string().into_bytes());
    let mut random = Random(0x5eed);
    let mut read = 0;
    for _ in 0..inputs() {
        let bytes = random.mutate(&seeds);
        let text = String::from_utf8_lossy(&bytes);
        read += usize::from(wire::up(&text).is_ok());
        let _ = wire::down(&text);
        let _ = api::parse::<shoal_control::controller::state::JobSpec>(&bytes);
        let _ = api::parse::<TokenRequest>(&bytes);
        let _ = api::parse::<JoinRequest>(&bytes);
        let _ = text.parse::<JoinToken>();
        let _ = text.parse::<Target>();
        let _ = guard::host_is_ours(&text, &[]);
        let _ = guard::origin_is_ours(&text, "127.0.0.1:7700");
        let _ = guard::bearer(&text);
        let _ = guard::numbers(&text, ["after", "wait_ms"]);
        let _ = api::refusal_of(400, &bytes);
    }
    assert!(read > 0, "some inputs are still messages");
}

mod erased {
    /// Whatever is JSON.
    pub trait Json {
        fn bytes(&self) -> Vec<u8>;
    }

    impl<T: serde::Serialize> Json for T {
        fn bytes(&self) -> Vec<u8> {
            serde_json::to_vec(self).expect("JSON")
        }
    }
}

/// Requests for certificates, whose encoding others' code reads, and not strictly: what a request's signature does not cover
/// may be changed. Whatever is signed is for the key that the request was made with. Signatures take long, so there are
/// fewer inputs.
#[test]
fn requests_for_certificates_never_panic_and_certify_no_other_key() {
    let authority = Authority::new().expect("an authority");
    let (applicant, other) = (Applicant::new().expect("a key"), Applicant::new().expect("a key"));
    let request = applicant.request_pem().expect("a request");
    let certificate = authority.sign(&request, "one").expect("a certificate");
    let is_own = |applicant: &Applicant, certificate: &str| {
        applicant.admitted(certificate, authority.certificate_pem()).is_ok()
    };
    assert!(is_own(&applicant, &certificate) && !is_own(&other, &certificate));
    let seeds = [request.into_bytes()];
    let mut random = Random(0xce27);
    for round in 0..inputs() / 10 {
        let bytes = random.mutate(&seeds);
        let text = String::from_utf8_lossy(&bytes);
        if let Ok(certificate) = authority.sign(&text, "one") {
            assert!(is_own(&applicant, &certificate), "round {round}: another key was certified: {text}");
        }
    }
}

/// Raw bytes into the server itself. Without credentials nothing is answered with anything but a refusal.
#[test]
fn requests_as_bytes_never_panic_and_never_get_in() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let router = fleet.router();
    let mut seeds: Vec<Vec<u8>> = Vec::new();
    for route in shoal_service::routes::ROUTES {
        let (verb, path) = (route.verb.name(), route.path.replace("{job}", "1").replace("{worker}", "1"));
        let query = if route.query.is_empty() { "" } else { "?after=1&wait_ms=0" };
        let body = serde_json::to_string(&spec("toy", 9)).expect("JSON");
        let length = body.len();
        seeds.push(
            format!(
                "{verb} {path}{query} HTTP/1.1\r\nHost: 127.0.0.1:7700\r\nAuthorization: Bearer guess\r\nShoal-Worker: \
                 one\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \
                 AAAAAAAAAAAAAAAAAAAAAA==\r\nOrigin: https://127.0.0.1:7700\r\nContent-Type: application/json\r\n\
                 Content-Length: {length}\r\n\r\n{body}"
            )
            .into_bytes(),
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut random = Random(0xb17e5);
    let mut refused = 0;
    for _ in 0..inputs() {
        let bytes = random.mutate(&seeds);
        let answered = runtime.block_on(async {
            let (mut near, far) = tokio::io::duplex(1 << 20);
            let serving = serve_stream(far, Peer(None), router.clone());
            let talking = async {
                let _ = near.write_all(&bytes).await;
                let _ = near.shutdown().await;
                let mut answer = Vec::new();
                let _ = near.read_to_end(&mut answer).await;
                answer
            };
            tokio::join!(serving, talking).1
        });
        let status = String::from_utf8_lossy(answered.get(9..12).unwrap_or_default()).into_owned();
        assert!(
            !status.starts_with('2') && !status.starts_with('1'),
            "{:?}",
            String::from_utf8_lossy(&bytes)
        );
        refused += usize::from(status == "401");
    }
    assert!(refused > 0, "some inputs are still requests");
    assert!(client(&fleet).jobs().expect("it lives").is_empty());
}
