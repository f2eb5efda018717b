//! The clouds' ways of saying that a machine will be taken away, spoken by a local server as their documentation has them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use shoal_service::http::Target;
use shoal_service::notice::{Cloud, Notice, watch};
use shoal_service::worker_driver::Happening;

/// What was asked: verb, path, headers in small letters.
type Asked = (String, String, String);
type Answering = dyn Fn(&str, &str, &str) -> (u16, &'static str, String) + Send + Sync;

/// A server that answers as it is told: status, headers, body.
fn metadata(answer: Box<Answering>) -> (Target, Arc<Mutex<Vec<Asked>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let target = format!("http://{}", listener.local_addr().expect("an address"));
    let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
    let log = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::new(stream);
            let mut first = String::new();
            reader.read_line(&mut first).expect("a request");
            let mut headers = String::new();
            while !headers.ends_with("\r\n\r\n") && !headers.starts_with("\r\n") {
                reader.read_line(&mut headers).expect("headers");
            }
            let headers = headers.to_ascii_lowercase();
            let mut words = first.split(' ');
            let (verb, path) = (words.next().expect("a verb"), words.next().expect("a path"));
            let (status, more, body) = answer(verb, path, &headers);
            log.lock().expect("not poisoned").push((verb.into(), path.into(), headers));
            let mut stream = reader.into_inner();
            let length = body.len();
            write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n{more}\r\n{body}")
                .expect("an answer");
            let _ = stream.read(&mut [0; 1]);
        }
    });
    (target.parse().expect("a target"), asked)
}

/// 2017-09-18T08:20:00Z.
const NOW_MS: u64 = 1_505_722_800_000;

#[test]
fn aws_tells_two_minutes_ahead_to_those_with_a_token() {
    let taken = Arc::new(Mutex::new(false));
    let told = taken.clone();
    let (target, asked) = metadata(Box::new(move |verb, path, headers| match (verb, path) {
        ("PUT", "/latest/api/token") if headers.contains("x-aws-ec2-metadata-token-ttl-seconds: 21600") => {
            (200, "", "a-token".into())
        }
        ("GET", "/latest/meta-data/spot/instance-action")
            if headers.contains("x-aws-ec2-metadata-token: a-token\r\n") =>
        {
            match *told.lock().expect("not poisoned") {
                true => (200, "", "{\"action\": \"terminate\", \"time\": \"2017-09-18T08:22:00Z\"}".into()),
                false => (404, "", String::new()),
            }
        }
        _ => (401, "", String::new()),
    }));
    let mut notices = Cloud::Aws.notices(Some(target));
    assert_eq!(notices.poll(NOW_MS), Ok(None));
    *taken.lock().expect("not poisoned") = true;
    assert_eq!(notices.poll(NOW_MS), Ok(Some(Notice { in_ms: 120_000 })));
    // Past it there is nothing left.
    assert_eq!(notices.poll(NOW_MS + 300_000), Ok(Some(Notice { in_ms: 0 })));
    let tokens = asked.lock().expect("not poisoned").iter().filter(|(verb, ..)| verb == "PUT").count();
    assert_eq!(tokens, 1, "a token is kept");
}

#[test]
fn an_aws_token_that_has_expired_is_made_anew() {
    let tokens = Mutex::new(0);
    let (target, _) = metadata(Box::new(move |verb, _, headers| {
        let mut tokens = tokens.lock().expect("not poisoned");
        match verb {
            "PUT" => {
                *tokens += 1;
                (200, "", format!("token-{tokens}"))
            }
            _ if headers.contains("token-2") => (404, "", String::new()),
            _ => (401, "", String::new()),
        }
    }));
    let mut notices = Cloud::Aws.notices(Some(target));
    assert!(notices.poll(NOW_MS).is_err());
    assert_eq!(notices.poll(NOW_MS), Ok(None));
}

#[test]
fn google_says_true_and_proves_that_it_is_google() {
    let preempted = Arc::new(Mutex::new("FALSE"));
    let told = preempted.clone();
    let (target, _) = metadata(Box::new(move |verb, path, headers| {
        let asked = headers.contains("metadata-flavor: google");
        match (verb, path, asked) {
            ("GET", "/computeMetadata/v1/instance/preempted", true) => {
                (200, "Metadata-Flavor: Google\r\n", told.lock().expect("not poisoned").to_string())
            }
            _ => (403, "", String::new()),
        }
    }));
    let mut notices = Cloud::Gcp.notices(Some(target));
    assert_eq!(notices.poll(NOW_MS), Ok(None));
    *preempted.lock().expect("not poisoned") = "TRUE";
    assert_eq!(notices.poll(NOW_MS), Ok(Some(Notice { in_ms: 30_000 })));
    let (stranger, _) = metadata(Box::new(|_, _, _| (200, "", "TRUE".into())));
    assert!(Cloud::Gcp.notices(Some(stranger)).poll(NOW_MS).is_err());
}

#[test]
fn azure_names_whom_it_means() {
    let events = Arc::new(Mutex::new(String::new()));
    let told = events.clone();
    let (target, _) = metadata(Box::new(move |verb, path, headers| {
        if verb != "GET" || !headers.contains("metadata: true") {
            return (400, "", String::new());
        }
        match path.split_once('?') {
            Some(("/metadata/instance/compute/name", query)) if query.contains("api-version=") => {
                (200, "", "worker-7".into())
            }
            Some(("/metadata/scheduledevents", query)) if query.contains("api-version=2020-07-01") => {
                let events = told.lock().expect("not poisoned").clone();
                (200, "", format!("{{\"DocumentIncarnation\": 2, \"Events\": [{events}]}}"))
            }
            _ => (404, "", String::new()),
        }
    }));
    let event = |kind: &str, machine: &str, not_before: &str| {
        format!(
            "{{\"EventId\": \"f0\", \"EventType\": \"{kind}\", \"ResourceType\": \"VirtualMachine\", \"Resources\": \
             [\"{machine}\"], \"EventStatus\": \"Scheduled\", \"NotBefore\": \"{not_before}\", \"Description\": \"\", \
             \"EventSource\": \"Platform\", \"DurationInSeconds\": -1}}"
        )
    };
    let mut notices = Cloud::Azure.notices(Some(target));
    let mut poll = |said: String| {
        *events.lock().expect("not poisoned") = said;
        notices.poll(NOW_MS)
    };
    let soon = "Mon, 18 Sep 2017 08:20:30 GMT";
    assert_eq!(poll(String::new()), Ok(None));
    assert_eq!(poll(event("Preempt", "worker-8", soon)), Ok(None));
    assert_eq!(poll(event("Freeze", "worker-7", soon)), Ok(None));
    assert_eq!(poll(event("Preempt", "worker-7", soon)), Ok(Some(Notice { in_ms: 30_000 })));
    assert_eq!(poll(event("Preempt", "worker-7", "")), Ok(Some(Notice { in_ms: 0 })), "it has begun");
    assert!(poll(event("Preempt", "worker-7", "soon")).is_err());
}

#[test]
fn a_watched_cloud_s_notice_reaches_the_worker() {
    let (target, _) = metadata(Box::new(|_, _, _| (200, "Metadata-Flavor: Google\r\n", "TRUE".into())));
    let (sender, happenings) = std::sync::mpsc::channel();
    watch(Cloud::Gcp.notices(Some(target)), sender, Arc::new(|_: &str| {}));
    let happening = happenings.recv_timeout(std::time::Duration::from_secs(60)).expect("a notice");
    assert!(matches!(happening, Happening::Notice { in_ms: 30_000, .. }));
}
