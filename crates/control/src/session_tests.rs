use super::*;
use crate::hostile::version;
use proptest::prelude::*;
use serde_json::json;

struct Talk {
    session: Session,
    now: Instant,
}

impl Talk {
    fn new(limits: Limits) -> Self {
        let mut talk = Self { session: Session::new(&version(), limits), now: Instant::now() };
        assert_eq!(talk.read()[0]["QMP"]["capabilities"], json!(["oob"]));
        talk
    }

    fn ready(limits: Limits, enable: &Value) -> Self {
        let mut talk = Self::new(limits);
        talk.send(&json!({"execute": "qmp_capabilities", "arguments": {"enable": enable}}));
        assert_eq!(talk.read(), [json!({"return": {}})]);
        talk
    }

    fn send(&mut self, request: &Value) {
        let line = format!("{request}\n");
        assert_eq!(self.session.receive(line.as_bytes(), self.now), line.len());
    }

    /// Returns all messages of the output.
    fn read(&mut self) -> Vec<Value> {
        let mut bytes = Vec::new();
        while !self.session.output().is_empty() {
            let part = self.session.output().to_vec();
            self.session.sent(part.len(), self.now);
            bytes.extend(part);
        }
        bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }

    fn call(&mut self) -> Call {
        self.session.next_call().expect("a call")
    }

    fn later(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.session.tick(self.now);
    }
}

#[test]
fn commands_need_one_negotiation_first() {
    let mut talk = Talk::new(Limits::default());
    talk.send(&json!({"execute": "stop", "id": 1}));
    talk.send(&json!({"execute": "qmp_capabilities", "arguments": {"enable": ["warp"]}, "id": 2}));
    talk.session.event(&Event::now("STOP", Value::Null));
    assert!(talk.session.next_call().is_none());
    let answers = talk.read();
    assert_eq!((&answers[0]["id"], &answers[0]["error"]["class"]), (&json!(1), &json!("CommandNotFound")));
    assert!(answers[1]["error"]["desc"].as_str().unwrap().contains("'warp'"), "{answers:?}");
    assert_eq!(answers.len(), 2, "no events before the negotiation");
    talk.send(&json!({"execute": "qmp_capabilities"}));
    talk.send(&json!({"execute": "qmp_capabilities", "id": 3}));
    talk.send(&json!({"exec-oob": "stop", "id": 4}));
    assert!(talk.session.next_call().is_none());
    let answers = talk.read();
    assert_eq!(answers[0], json!({"return": {}}));
    assert!(answers[1]["error"]["desc"].as_str().unwrap().contains("already complete"));
    assert!(answers[2]["error"]["desc"].as_str().unwrap().contains("was not enabled"));
}

#[test]
fn in_band_commands_run_in_turn_and_out_of_band_commands_at_once() {
    let mut talk = Talk::ready(Limits::default(), &json!(["oob"]));
    talk.send(&json!({"execute": "first", "id": "a", "arguments": {"x": 1}}));
    talk.send(&json!({"nonsense": 1, "id": "bad"}));
    talk.send(&json!({"execute": "second"}));
    let first = talk.call();
    assert_eq!((&*first.name, &first.arguments.0["x"]), ("first", &json!(1)));
    assert!(talk.session.next_call().is_none(), "one at a time");
    talk.send(&json!({"exec-oob": "urgent", "id": "b"}));
    let urgent = talk.call();
    assert!(urgent.oob && talk.session.next_call().is_none());
    talk.session.answer(urgent.ticket, Ok(json!(2)));
    assert_eq!(
        talk.read(),
        [json!({"return": 2, "id": "b"})],
        "an out-of-band answer overtakes, an in-band error does not"
    );
    talk.session.answer(first.ticket, Err(QmpError::generic("no")));
    let second = talk.call();
    talk.session.answer(second.ticket, Ok(json!({})));
    talk.session.answer(second.ticket, Ok(json!("twice")));
    let answers = talk.read();
    assert_eq!(answers[0], json!({"error": {"class": "GenericError", "desc": "no"}, "id": "a"}));
    assert_eq!(answers[1]["id"], "bad");
    assert_eq!(answers[2..], [json!({"return": {}})], "a request without id has an answer without id");
}

#[test]
fn session_takes_no_more_input_than_it_can_answer() {
    let mut talk = Talk::ready(Limits { pending: 3, ..Limits::default() }, &json!([]));
    let requests = "{\"execute\": \"a\"}".repeat(10);
    let taken = talk.session.receive(requests.as_bytes(), talk.now);
    assert_eq!(taken, 3 * 16);
    let call = talk.call();
    assert!(!talk.session.wants_input(), "what is being executed counts");
    talk.session.answer(call.ticket, Ok(json!({})));
    assert!(talk.session.wants_input());
    assert_eq!(talk.session.receive(&requests.as_bytes()[taken..], talk.now), 16);
    // While answers are unread, the session takes no input.
    let mut talk = Talk::ready(Limits { out_bytes: 4096, ..Limits::default() }, &json!([]));
    talk.send(&json!({"execute": "a"}));
    let call = talk.call();
    talk.session.answer(call.ticket, Ok(json!("x".repeat(2000))));
    assert!(!talk.session.wants_input());
    talk.read();
    assert!(talk.session.wants_input());
}

#[test]
fn answer_counts_as_sent_with_its_last_byte() {
    let mut talk = Talk::ready(Limits::default(), &json!([]));
    talk.send(&json!({"execute": "a"}));
    talk.send(&json!({"execute": "b"}));
    let a = talk.call();
    talk.session.answer(a.ticket, Ok(json!({})));
    let b = talk.call();
    talk.session.answer(b.ticket, Ok(json!({})));
    let all = talk.session.output().len();
    assert_eq!(talk.session.sent(all / 2 - 1, talk.now), []);
    assert_eq!(talk.session.sent(2, talk.now), [a.ticket]);
    assert_eq!(talk.session.sent(all, talk.now), [b.ticket], "no more than there is");
    assert!(talk.session.output().is_empty());
}

#[test]
fn client_that_breaks_a_limit_is_told_and_dropped() {
    let limits = || Limits { message_bytes: 100, depth: 4, ..Limits::default() };
    let mut long = Talk::ready(limits(), &json!([]));
    long.session.receive(format!("{{\"a\": \"{}", "x".repeat(200)).as_bytes(), long.now);
    let mut deep = Talk::ready(limits(), &json!([]));
    deep.session.receive(b"{\"a\": [[[[", deep.now);
    let mut half = Talk::ready(limits(), &json!([]));
    half.session.receive(b"{\"execute\": ", half.now);
    half.later(29);
    assert_eq!(half.session.ended(), None);
    half.session.receive(b"\"a\"", half.now);
    half.later(2);
    for (mut talk, why) in [(long, End::TooLong), (deep, End::TooDeep), (half, End::HalfMessage)] {
        assert_eq!(talk.session.ended(), Some(why));
        assert_eq!(talk.read()[0]["error"]["desc"], why.to_string());
        assert!(!talk.session.wants_input());
        assert_eq!(talk.session.receive(b"{\"execute\": \"a\"}", talk.now), 0);
    }
}

#[test]
fn client_that_does_not_read_is_dropped() {
    let mut talk = Talk::ready(Limits::default(), &json!([]));
    talk.session.event(&Event::now("STOP", Value::Null));
    talk.later(1);
    talk.later(29);
    assert_eq!(talk.session.ended(), None);
    talk.session.sent(1, talk.now);
    talk.later(29);
    assert_eq!(talk.session.ended(), None, "slow reading is allowed");
    talk.later(2);
    assert_eq!(talk.session.ended(), Some(End::Unread));
    let mut talk = Talk::ready(Limits { out_bytes: 1000, ..Limits::default() }, &json!([]));
    for _ in 0..20 {
        talk.session.event(&Event::now("MIGRATION_PASS", json!({"pass": 1})));
    }
    assert_eq!(talk.session.ended(), Some(End::Unread), "events must not pile up");
    assert!(talk.session.output().len() < 1200);
}

#[test]
fn session_answers_all_requests_after_the_client_has_finished() {
    let mut talk = Talk::ready(Limits::default(), &json!([]));
    talk.send(&json!({"execute": "a"}));
    talk.session.finish();
    let call = talk.call();
    assert_eq!(talk.session.ended(), None);
    talk.session.answer(call.ticket, Ok(json!(1)));
    assert_eq!(talk.session.ended(), None);
    assert_eq!(talk.read(), [json!({"return": 1})]);
    assert_eq!(talk.session.ended(), Some(End::Done));
}

proptest! {
    #[test]
    fn every_request_is_answered_once_in_order(
        kinds in prop::collection::vec(0u8..4, 0..30),
        cuts in prop::collection::vec(1usize..40, 1..20),
    ) {
        let mut bytes = Vec::new();
        for (id, kind) in kinds.iter().enumerate() {
            bytes.extend(match kind {
                0 => format!("{{\"execute\": \"echo\", \"id\": {id}}}"),
                1 => format!("{{\"execute\": 1, \"id\": {id}}}\r\n"),
                2 => format!(" {{\"id\": {id}\n, \"execute\": \"fail\"}}\n"),
                _ => format!("{{\"execute\": \"qmp_capabilities\", \"id\": {id}}}"),
            }.into_bytes());
        }
        let mut talk = Talk::ready(Limits { pending: 2, ..Limits::default() }, &json!([]));
        let (mut rest, mut cuts, mut answers) = (&bytes[..], cuts.iter().cycle(), Vec::new());
        while !rest.is_empty() {
            let part = &rest[..rest.len().min(*cuts.next().unwrap())];
            rest = &rest[talk.session.receive(part, talk.now)..];
            while let Some(call) = talk.session.next_call() {
                let result = if call.name == "echo" { Ok(json!({})) } else { Err(QmpError::generic("no")) };
                talk.session.answer(call.ticket, result);
            }
            answers.extend(talk.read());
        }
        let ids: Vec<_> = answers.iter().map(|answer| answer["id"].as_u64()).collect();
        prop_assert_eq!(ids, (0..kinds.len() as u64).map(Some).collect::<Vec<_>>());
        for (answer, kind) in answers.iter().zip(&kinds) {
            prop_assert_eq!(answer.get("return").is_some(), *kind == 0, "{}", answer);
        }
    }
}
